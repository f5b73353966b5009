// The groups that came last, and one group's trace as a waterfall with what the ledger says of it.

import { ago, byId, clock, duration, element, plural, render, whole } from "./format.js";

const PHASES = [
  ["rollout.generate", "generate", "wait"],
  ["rollout.score", "score", "optimizer"],
  ["rollout.put", "put", "publish"],
  ["trainer.buffer_wait", "buffer", "other"],
  ["trainer.train_group", "train", "train"],
];
const COLOURS = { "rollout.group": "checkpoint", "engine.generate": "wait", "router.generate": "wait-2", "reward.score": "optimizer" };

export class Groups {
  constructor() {
    this.selected = "";
    this.rows = [];
    this.busy = false;
    this.showCalls = false;
    byId("find").addEventListener("submit", (event) => {
      event.preventDefault();
      const wanted = byId("find-group").value.trim();
      if (wanted) this.select(wanted);
    });
    const wanted = new URLSearchParams(location.search).get("group");
    if (wanted) this.select(wanted);
    this.show();
  }

  // Asks for the list; a request that is still out is not followed by another.
  async refresh() {
    if (this.busy) return;
    this.busy = true;
    try {
      const response = await fetch("api/traces?limit=14");
      if (response.ok) this.rows = await response.json();
    } catch {
      return; // the connection state says so already
    } finally {
      this.busy = false;
    }
    // A page that was just opened shows the life of one group, without being asked.
    if (!this.selected && this.rows.length) {
      this.selected = this.rows[0].group_id;
      this.open = true;
    }
    this.show();
    if (this.selected && this.open) await this.load(this.selected);
  }

  show() {
    const now = Date.now() / 1000;
    render(byId("group-list"), [this.rows, this.selected], () => {
      if (!this.rows.length) return element("p", { class: "none" }, "No traced group yet. A group appears here when its rollout ends.");
      const head = ["Group", "Ended", "Took", "Step"].map((name, at) => element("th", { scope: "col", class: at ? "num" : "" }, name));
      const rows = this.rows.map((row) =>
        element(
          "tr",
          { class: row.group_id === this.selected ? "on" : "" },
          element(
            "th",
            { scope: "row" },
            element("button", { type: "button", class: "row-link", "aria-pressed": String(row.group_id === this.selected), data: { key: row.group_id }, onclick: () => this.select(row.group_id) }, row.group_id),
            row.attempt > 1 ? element("span", { class: "tag" }, `attempt ${row.attempt}`) : null,
            row.errors ? element("span", { class: "tag", data: { behind: "2" } }, plural(row.errors, "error")) : null,
          ),
          element("td", { class: "num" }, ago(now - row.start_time - row.duration)),
          element("td", { class: "num" }, duration(row.duration)),
          element("td", { class: "num" }, row.step === null ? "–" : whole(row.step)),
        ),
      );
      return element("table", {}, element("caption", { class: "unseen" }, "Groups whose rollout ended last"), element("thead", {}, element("tr", {}, head)), element("tbody", {}, rows));
    });
    if (!this.selected) {
      render(byId("group"), this.rows.length, () => this.rows.length && element("p", { class: "hint" }, "Choose a group to see its life: generate, score, put, wait in the buffer, train."));
    }
  }

  async select(group) {
    this.selected = group;
    const url = new URL(location.href);
    url.searchParams.set("group", group);
    history.replaceState(null, "", url);
    this.show();
    await this.load(group);
  }

  async load(group) {
    let body;
    try {
      const response = await fetch(`api/trace?group=${encodeURIComponent(group)}`);
      body = await response.json();
    } catch {
      return;
    }
    if (group !== this.selected) return;
    // A life that has ended does not change any more.
    this.open = !body.trace?.spans.some((span) => span.name === "trainer.train_group");
    render(byId("group"), [group, body, this.showCalls], () => this.view(group, body));
  }

  view(group, body) {
    if (body.error) return element("p", { class: "hint" }, body.error);
    const parts = [element("h3", {}, `Group ${group}`)];
    if (body.history.length) {
      parts.push(
        element(
          "ol",
          { class: "history", "aria-label": "Ledger" },
          body.history.slice(-8).map((event) => element("li", { title: event.detail }, element("b", {}, event.state), ` ${clock(event.time)}`)),
        ),
      );
    }
    if (!body.trace) return [...parts, element("p", { class: "hint" }, "This group was not traced, or its spans have been deleted to make room.")];
    parts.push(strip(body.trace), this.waterfall(body.trace));
    return parts;
  }

  waterfall(trace) {
    const calls = trace.spans.filter(isCall).length;
    const spans = this.showCalls ? trace.spans : withoutCalls(trace.spans);
    const total = trace.duration || 1e-9;
    const ticks = [0, 0.25, 0.5, 0.75, 1].map((share) => element("span", {}, duration(share * total)));
    return [
      element("div", { class: "axis", "aria-hidden": "true" }, element("span"), element("div", {}, ticks)),
      element("ol", { class: "waterfall", "aria-label": `Trace of ${plural(trace.num_spans, "span")}` }, spans.map((span) => spanRow(span, total))),
      calls
        ? element("button", { type: "button", class: "quiet", data: { key: "calls" }, onclick: () => { this.showCalls = !this.showCalls; this.load(this.selected); } }, this.showCalls ? "Hide calls" : `Show ${plural(calls, "call")}`)
        : null,
    ].filter(Boolean).reduce((box, child) => (box.append(child), box), element("div"));
  }
}

const isCall = (span) => span.name.startsWith("/") || "rpc.system" in span.attributes;

// Spans come parents first, so what stood under a call moves up to where the call was.
function withoutCalls(spans) {
  const depths = new Map();
  return spans.flatMap((span) => {
    const depth = depths.get(span.parent_id) ?? 0;
    depths.set(span.span_id, isCall(span) ? depth : depth + 1);
    return isCall(span) ? [] : [{ ...span, depth }];
  });
}

function strip(trace) {
  const items = PHASES.map(([name, label, colour]) => {
    const spans = trace.spans.filter((span) => span.name === name);
    const seconds = spans.length ? spans.reduce((sum, span) => sum + span.duration, 0) : null;
    return [label, colour, seconds];
  });
  return element(
    "ol",
    { class: "strip", "aria-label": "Phases" },
    element("li", { data: { done: "true" } }, element("i", { style: { "--c": "var(--ink-3)" } }), "prompt", element("b", {}, clock(trace.start_time))),
    items.map(([label, colour, seconds]) =>
      element("li", { data: { done: String(seconds !== null) } }, element("i", { style: { "--c": `var(--${colour})` } }), label, element("b", {}, seconds === null ? "not yet" : duration(seconds))),
    ),
  );
}

function spanRow(span, total) {
  const attributes = Object.entries(span.attributes)
    .filter(([key]) => key.startsWith("paceline.") && key !== "paceline.group_id")
    .map(([key, value]) => `${key.slice(9).replaceAll("_", " ")} ${value}`);
  const left = (100 * span.start) / total;
  const width = Math.max(0.3, (100 * span.duration) / total);
  const phase = PHASES.find(([name]) => name === span.name);
  const colour = phase ? phase[2] : COLOURS[span.name] || "other";
  const outside = left + width > 82;
  const words = [span.member, ...attributes, span.error].filter(Boolean).join(" · ");
  return element(
    "li",
    { data: { error: String(Boolean(span.error)) }, title: words },
    element("span", { class: "name", style: { "padding-left": `${Math.min(span.depth, 6) * 12}px` } }, span.name, element("small", {}, span.member)),
    element(
      "span",
      { class: "lane" },
      element("i", { style: { "--c": `var(--${colour})`, left: `${left}%`, width: `${width}%` } }),
      element("small", { class: outside ? "before" : "", style: outside ? { right: `${100 - left}%` } : { left: `${left + width}%` } }, duration(span.duration), span.error ? ` ${span.error}` : ""),
    ),
  );
}
