// Curves by step over uPlot: one card a chart, a legend that follows the cursor, one cursor for all.

import { element, number, setText } from "./format.js";

const ALL = [];
const LEAST_BAR = 6; // pixels; below it a stack is drawn as areas

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

function faded(hex, share) {
  const alpha = Math.round(share * 255).toString(16).padStart(2, "0");
  return hex + alpha;
}

export class Chart {
  // series: [{key, label, colour, format?, points?, band?: [lowKey, highKey], spread?, dash?, alarm?}]
  // optional: the card is there only with data. bounds: column [least, most] that the values cannot leave.
  constructor(parent, { title, note, series, height = 150, stacked = false, log = false, unit = "", empty, optional = false, bounds }) {
    Object.assign(this, { title, series, height, stacked, log, unit, empty, optional, bounds, parent });
    this.data = null;
    this.zoomed = false;
    this.plot = null;
    this.values = series.map(() => element("b", { class: "value" }, "–"));
    this.at = element("span", { class: "at" });
    this.said = element("span", { class: "unseen", role: "status" });
    this.body = element("div", { class: "plot" });
    this.figure = element(
      "figure",
      { class: "card chart", tabindex: "0", role: "group", "aria-label": title, data: { points: "0" } },
      element(
        "figcaption",
        { class: "head" },
        element("h2", {}, title),
        this.at,
        note ? element("p", { class: "note" }, note) : null,
      ),
      element(
        "ul",
        { class: "legend" },
        series.map((item, index) =>
          element(
            "li",
            {},
            element("i", { class: item.points ? "dot" : "stroke", style: { "--c": `var(--${item.colour})` } }),
            item.label,
            " ",
            this.values[index],
          ),
        ),
      ),
      this.body,
      this.said,
    );
    this.figure.addEventListener("keydown", (event) => this.key(event));
    parent.append(this.figure);
    new ResizeObserver(() => this.resize()).observe(this.body);
    ALL.push(this);
  }

  // columns: {x: [...], [key]: [...]}
  update(columns) {
    this.columns = columns;
    const count = columns.x.length;
    this.figure.dataset.points = String(count);
    const has = this.series.some((item) => columns[item.key]?.some((value) => value !== null));
    this.figure.classList.toggle("nothing", !has);
    this.parent.hidden = this.optional && !has;
    this.body.dataset.empty = has ? "" : this.empty || "not measured in this run";
    this.data = this.table(columns);
    if (!has) return this.destroy();
    if (!this.plot) this.make();
    else {
      this.plot.setData(this.data, !this.zoomed);
      if (this.zoomed) this.plot.redraw();
    }
    this.show(this.plot.cursor.idx);
  }

  table(columns) {
    const columnOf = (key) => columns[key] || columns.x.map(() => null);
    if (this.stacked) {
      const sums = columns.x.map(() => 0);
      const layers = this.series.map((item) => columnOf(item.key).map((value, at) => (sums[at] += value || 0)));
      return [columns.x, ...layers.reverse()];
    }
    const bands = this.series.filter((item) => item.band).flatMap((item) => item.band.map(columnOf));
    const lift = (column) => (this.log ? column.map((value) => (value === null ? null : Math.max(value, 1e-9))) : column);
    return [columns.x, ...this.series.map((item) => lift(columnOf(item.key))), ...bands];
  }

  destroy() {
    this.plot?.destroy();
    this.plot = null;
  }

  make() {
    this.destroy();
    const grid = { stroke: colour("grid"), width: 1 };
    const text = { stroke: colour("ink-3"), font: "11px system-ui, sans-serif", ticks: { show: false } };
    const options = {
      width: this.body.clientWidth || 300,
      height: this.height,
      padding: [8, 12, 0, 0],
      legend: { show: false },
      cursor: {
        sync: { key: "steps" },
        points: { size: 6, show: !this.stacked },
        drag: { x: true, y: false, dist: 8 },
        y: false,
      },
      scales: { x: { time: false, range: (u, low, high) => (this.stacked || low === high ? [low - 0.5, high + 0.5] : [low, high]) }, y: this.yScale() },
      axes: [
        { ...text, grid: { show: false }, size: 26, space: 44, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], values: (u, ticks) => ticks.map((tick) => tick.toLocaleString("en-US")) },
        { ...text, grid, size: 46, space: 24, ...(this.log && { splits: powers }), values: (u, ticks, axis, space, step) => ticks.map((tick) => this.tick(tick, step)) },
      ],
      series: [{}, ...this.lines()],
      bands: this.bands(),
      hooks: {
        setCursor: [(u) => this.show(u.cursor.idx)],
        setSelect: [(u) => (this.zoomed = u.select.width > 0 || this.zoomed)],
        draw: [(u) => this.alarms(u), axisName],
        ready: [(u) => u.over.addEventListener("dblclick", () => ALL.forEach((chart) => (chart.zoomed = false)))],
      },
    };
    this.plot = new uPlot(options, this.data, this.body);
  }

  tick(value, step) {
    if (value === null) return "";
    if (this.log) return value >= 0.001 ? String(Number(value.toPrecision(1))) : `1e−${-Math.round(Math.log10(value))}`;
    if (Math.abs(value) >= 1e4) return number(value) + this.unit;
    const digits = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step) - 1e-9) + (/^0*[.]?0*25/.test(String(step)) ? 1 : 0)));
    const text = value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
    return text.replace("-", "−") + this.unit;
  }

  yScale() {
    const limits = this.series.filter((item) => item.alarm).map((item) => item.alarm);
    if (this.log) {
      return {
        distr: 3,
        range: (u, low, high) => [
          10 ** Math.floor(Math.log10(Math.max(Math.min(low ?? 1e-4, ...limits), 1e-9))),
          10 ** Math.ceil(Math.log10(Math.max(high ?? 1, ...limits) * 1.01)),
        ],
      };
    }
    const zero = this.stacked || this.series.some((item) => item.fromZero);
    return {
      range: (u, low, high) => {
        if (low === null) return [0, 1];
        const bottom = zero ? Math.min(0, low) : low;
        if (high === bottom) return zero ? [bottom, bottom + 1] : [low - (Math.abs(low) || 1), high + (Math.abs(high) || 1)];
        const room = (high - bottom) * 0.08;
        const [least, most] = (this.bounds && this.columns?.[this.bounds]) || [-Infinity, Infinity];
        // A line along a bound is drawn whole.
        const edge = (high - bottom) * 0.02;
        return [zero && low >= 0 ? 0 : Math.max(least - edge, bottom - room), Math.min(most + edge, high + room)];
      },
    };
  }

  lines() {
    if (this.stacked) {
      const bars = uPlot.paths.bars({ size: [0.8, 26, 1], gap: 0 });
      const areas = uPlot.paths.linear();
      const paths = (u, index, from, to) => (u.bbox.width / devicePixelRatio / (to - from + 1) < LEAST_BAR ? areas : bars)(u, index, from, to);
      return this.series
        .map((item) => ({ stroke: colour(item.colour), fill: colour(item.colour), width: 0, points: { show: false }, paths }))
        .reverse();
    }
    const lines = this.series.map((item) => {
      const stroke = colour(item.colour);
      if (item.points) {
        return { stroke, width: 1.25, dash: [3, 3], spanGaps: true, points: { show: true, size: 6, fill: stroke, width: 0 } };
      }
      const few = (this.columns?.x.length ?? 0) < 3;
      return { stroke, width: 1.75, dash: item.dash, spanGaps: true, points: { show: few, size: 6, fill: stroke } };
    });
    const edges = this.series.filter((item) => item.band).flatMap(() => [0, 1].map(() => ({ stroke: "transparent", width: 0, points: { show: false } })));
    return [...lines, ...edges];
  }

  bands() {
    let next = this.series.length + 1;
    return this.series
      .filter((item) => item.band && !this.stacked)
      .map((item) => {
        const pair = { series: [next + 1, next], fill: faded(colour(item.colour), 0.14) };
        next += 2;
        return pair;
      });
  }

  alarms(u) {
    const { ctx, bbox } = u;
    for (const [order, item] of this.series.filter((each) => each.alarm).entries()) {
      const y = u.valToPos(item.alarm, "y", true);
      if (y < bbox.top || y > bbox.top + bbox.height) continue;
      ctx.save();
      ctx.strokeStyle = faded(colour(item.colour), 0.75);
      ctx.lineWidth = devicePixelRatio;
      ctx.setLineDash([5 * devicePixelRatio, 4 * devicePixelRatio]);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
      ctx.font = `${10 * devicePixelRatio}px system-ui, sans-serif`;
      ctx.textAlign = "right";
      const words = `alarm ${item.alarm}`;
      const [right, base] = [bbox.left + bbox.width - 2, y + (order ? 13 : -5) * devicePixelRatio];
      const wide = ctx.measureText(words).width + 6 * devicePixelRatio;
      ctx.fillStyle = faded(colour("surface"), 0.85);
      ctx.fillRect(right - wide, base - 9 * devicePixelRatio, wide, 11 * devicePixelRatio);
      ctx.fillStyle = colour("ink-3");
      ctx.fillText(words, right, base);
      ctx.restore();
    }
  }

  // Values at an index, or the newest of each when there is no cursor.
  show(index) {
    const columns = this.columns;
    if (!columns) return;
    const at = index === null || index === undefined ? null : index;
    this.figure.dataset.range = [this.plot?.scales.y.min, this.plot?.scales.y.max].join(" ");
    setText(this.at, at === null ? "" : `step ${columns.x[at]}`);
    this.series.forEach((item, which) => {
      const column = columns[item.key] || [];
      const value = at === null ? newest(column) : column[at];
      let text = (item.format || number)(value ?? null);
      if (item.band && value !== null && value !== undefined) {
        const spread = (columns[item.spread] || [])[at === null ? lastIndex(column) : at];
        if (spread !== null && spread !== undefined) text += ` ± ${number(spread)}`;
      }
      setText(this.values[which], text);
    });
  }

  key(event) {
    const last = this.columns ? this.columns.x.length - 1 : -1;
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined || last < 0 || !this.plot) return;
    event.preventDefault();
    const now = this.plot.cursor.idx ?? last;
    const index = Math.max(0, Math.min(last, now + step));
    const left = Math.max(0, this.plot.valToPos(this.columns.x[index], "x"));
    this.plot.setCursor({ left, top: 10 }, true, true);
    this.said.textContent = `step ${this.columns.x[index]}: ${this.series
      .map((item, which) => `${item.label} ${this.values[which].textContent}`)
      .join(", ")}`;
  }

  resize() {
    const width = this.body.clientWidth;
    if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.height });
  }
}

// What the numbers below are, in the corner that no tick uses.
function axisName(u) {
  const { ctx, bbox } = u;
  ctx.save();
  ctx.fillStyle = colour("ink-3");
  ctx.font = `${11 * devicePixelRatio}px system-ui, sans-serif`;
  ctx.textAlign = "left";
  ctx.textBaseline = "top";
  ctx.fillText("step", 4 * devicePixelRatio, bbox.top + bbox.height + 5 * devicePixelRatio);
  ctx.restore();
}

// One line a power of ten; those between only make noise.
function powers(u, axis, low, high) {
  const first = Math.round(Math.log10(low));
  return Array.from({ length: Math.round(Math.log10(high)) - first + 1 }, (_, at) => 10 ** (first + at));
}

function lastIndex(column) {
  for (let at = column.length - 1; at >= 0; at--) if (column[at] !== null && column[at] !== undefined) return at;
  return -1;
}

function newest(column) {
  const at = lastIndex(column);
  return at < 0 ? null : column[at];
}

// A theme has other colours, and uPlot paints with those it was made with.
document.addEventListener("themechange", () => ALL.forEach((chart) => chart.plot && chart.make()));
