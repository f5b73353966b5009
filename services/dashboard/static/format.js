// Numbers and times as people read them, and small DOM construction. Text only ever becomes text nodes.

const GROUPED = new Intl.NumberFormat("en-US");

export function whole(value) {
  return value === null || value === undefined ? "–" : GROUPED.format(Math.round(value));
}

// Three significant digits: 0.0124, 1.53, 812, 12.4k, 3.1e−7.
export function number(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  return plain(value).replaceAll("-", "−");
}

function plain(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size >= 1000) return GROUPED.format(Math.round(value));
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 1) return value.toFixed(2);
  if (size >= 0.001) return String(Number(value.toPrecision(3)));
  return value.toExponential(1);
}

function trim(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
}

export function percent(share) {
  if (share === null || share === undefined) return "–";
  const value = 100 * share;
  return `${value > 0 && value < 1 ? "<1" : value.toFixed(0)} %`;
}

// 0.34 s, 12 s, 3 min 20 s, 2 h 05 min, 3 d 4 h
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds === 0) return "0 s";
  if (seconds < 0.001) return "<1 ms";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const total = Math.round(seconds);
  if (total < 3600) return `${Math.floor(total / 60)} min ${String(total % 60).padStart(2, "0")} s`;
  const minutes = Math.round(total / 60);
  if (minutes < 1440) return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor((minutes % 1440) / 60)} h`;
}

// Of something that goes on: whole seconds.
export function since(seconds) {
  const full = Math.floor(seconds);
  return full < 60 ? `${full} s` : duration(full);
}

export function ago(seconds) {
  if (seconds < 1.5) return "now";
  return seconds < 60 ? `${Math.round(seconds)} s ago` : `${duration(seconds)} ago`;
}

export function clock(unix) {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}

export function plural(count, word) {
  return `${whole(count)} ${word}${count === 1 ? "" : "s"}`;
}

export function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(properties)) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.className = value;
    else if (key === "data") Object.assign(node.dataset, value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") for (const [name, each] of Object.entries(value)) node.style.setProperty(name, each);
    else node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// Replaces the children only when what they show has changed, so that hover, focus and screen readers are left alone.
const shown = new WeakMap();
export function render(node, key, build) {
  const text = JSON.stringify(key);
  if (shown.get(node) === text) return;
  shown.set(node, text);
  const focused = node.contains(document.activeElement) ? document.activeElement.dataset.key : null;
  node.replaceChildren(...[build()].flat().filter(Boolean));
  if (focused) node.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
}

export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export const byId = (id) => document.getElementById(id);
