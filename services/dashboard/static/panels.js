// Everything of the overview that is not a curve: head, verdict, engines, waits, ledger, alarms, sources.

import { PHASES } from "./curves.js";
import { byId, duration, element, number, percent, plural, render, setText, since, whole } from "./format.js";

const SERVICES = ["coordinator", "trainer", "rollout", "engine", "router", "reward"];
const WAITS_SHOWN = 9;

const FATES = [
  ["committed", "committed", "train"],
  ["uncommitted", "trained, not yet in a checkpoint", "train-2"],
  ["claimed", "in the step", "optimizer"],
  ["buffered", "buffered", "publish"],
  ["generating", "generating", "wait"],
  ["waiting", "to be issued again", "wait-2"],
  ["dropped", "dropped", "checkpoint"],
  ["dead", "dead", "bad"],
];

// `last` is the newest training record that the curves show, null when there is none.
export function showOverview(view, last) {
  const empty = Boolean(view.awaiting) && !last;
  showHead(view, last?.values ?? {});
  showSources(view.sources);
  byId("empty").hidden = !empty;
  byId("verdict").hidden = view.verdict.kind === "none";
  byId("curves").hidden = empty;
  if (empty) showEmpty(view);
  else showVerdict(view.verdict);
  showEngines(view);
  showOthers(view.members);
  showWaits(view);
  showLedger(view.ledger);
  showAlarms(view.alarms);
  showFoot(view);
}

function isOver(run) {
  return ["finished", "failed", "stopped"].includes(run.state);
}

function showHead({ run, alarms }, values) {
  document.title = `${run.run_id} · ${run.step}/${run.num_steps} · Paceline`;
  setText(byId("run-name"), run.run_id);
  const state = byId("run-state");
  state.dataset.state = run.state;
  setText(state, run.state === "unknown" ? "not known" : run.state);
  setText(byId("run-about"), [run.model, run.reason].filter(Boolean).join(" · "));
  setText(byId("fact-step"), `${whole(run.step)} of ${whole(run.num_steps)}`);
  setText(byId("fact-elapsed"), duration(run.elapsed_seconds));
  setText(byId("fact-eta"), run.eta_seconds === null ? "–" : `about ${duration(run.eta_seconds)}`);
  byId("fact-eta").parentElement.hidden = isOver(run);
  setText(byId("fact-version"), run.newest_version ? whole(run.newest_version) : "none yet");
  byId("fact-version").parentElement.hidden = !run.publishes;
  setText(byId("fact-reward").previousElementSibling, `${run.rewarded ? "Reward" : "Loss"}, last step`);
  setText(byId("fact-reward"), number((run.rewarded ? values.reward_mean : values.loss) ?? null));
  setText(byId("fact-mode"), run.mode);
  const share = run.num_steps ? Math.min(1, run.step / run.num_steps) : 0;
  const bar = byId("progress");
  bar.setAttribute("aria-valuenow", (100 * share).toFixed(0));
  bar.firstElementChild.style.width = `${100 * share}%`;
  const count = byId("alarm-count");
  count.hidden = !alarms.length;
  count.dataset.level = alarms.some((alarm) => alarm.level === "critical") ? "critical" : "warning";
  setText(count, plural(alarms.length, "alarm"));
}

function showSources(sources) {
  const failed = [];
  for (const source of sources.filter((each) => !each.ok)) {
    const same = failed.find((each) => each.error === source.error);
    if (same) same.name += ` and the ${source.name}`;
    else failed.push({ ...source });
  }
  byId("sources").hidden = !failed.length;
  render(byId("sources"), failed.map((source) => [source.name, source.error, Math.floor(source.seconds)]), () =>
    failed.map((source) =>
      element("p", {}, element("b", {}, `The ${source.name} cannot be read`), ` for ${since(source.seconds)}. `, element("span", { class: "cause" }, source.error)),
    ),
  );
}

function showEmpty(view) {
  setText(byId("empty-text"), view.awaiting);
  const found = SERVICES.map((service) => {
    const members = view.members.filter((member) => member.service === service);
    const well = members.filter((member) => member.health === "ok");
    const words = !members.length
      ? "has not joined"
      : members.map((member) => `${member.member_id} ${healthWords(member)}`).join(", ");
    return [service, well.length > 0, words];
  });
  render(byId("empty-list"), found, () =>
    found.map(([service, ok, words]) =>
      element("li", { data: { ok: String(ok) } }, element("b", {}, service), element("span", {}, words)),
    ),
  );
}

function showVerdict(verdict) {
  setText(byId("verdict-text"), verdict.kind === "none" ? verdict.sentence : `${verdict.title}: ${verdict.sentence}`);
  byId("verdict").dataset.kind = verdict.kind;
  byId("verdict-knob").hidden = !verdict.knob;
  setText(byId("verdict-knob"), verdict.knob ? `What helps: ${verdict.knob}.` : "");
  render(byId("verdict-bars"), [verdict.shares, verdict.engine_idle], () => {
    const shares = PHASES.map(([, phase, label, colour]) => [label, verdict.shares[phase] || 0, colour]);
    const over = verdict.num_steps === 1 ? "the last step" : `the last ${verdict.num_steps} steps`;
    const bars = [bar(`Trainer, over ${over}`, shares)];
    if (verdict.engine_idle !== null) {
      bars.push(bar("Engines, in the same time", [["busy", 1 - verdict.engine_idle, "wait"], ["idle", verdict.engine_idle, "other"]]));
    }
    return bars;
  });
}

function bar(title, parts) {
  const shown = parts.filter(([, share]) => share > 0.004);
  const words = shown.map(([label, share]) => `${label} ${percent(share)}`).join(", ");
  return element(
    "div",
    { class: "share" },
    element("p", { class: "share-title" }, title),
    element(
      "div",
      { class: "stack", role: "img", "aria-label": `${title}: ${words}` },
      shown.map(([label, share, colour]) =>
        element("i", { style: { "--c": `var(--${colour})`, "flex-grow": String(share) }, title: `${label} ${percent(share)}` }),
      ),
    ),
    element("ul", { class: "keys" }, shown.map(([label, share, colour]) => key(label, percent(share), colour))),
  );
}

function key(label, value, colour) {
  return element("li", {}, element("i", { style: { "--c": `var(--${colour})` } }), label, " ", element("b", {}, value));
}

function healthWords(member) {
  if (member.health === "ok") return member.state === "READY" ? "ready" : member.state.toLowerCase();
  if (member.health === "starting") return member.state.toLowerCase();
  const time = member.since_seconds === null ? "" : ` for ${since(member.since_seconds)}`;
  const ended = member.since_seconds === null ? "ended with the run" : `gone ${since(member.since_seconds)} before the end`;
  return { failed: "failed", silent: `silent${time}`, left: "left", lost: `gone${time}`, ended }[member.health];
}

function healthMark(member) {
  return element("span", { class: "health", data: { health: member.health }, title: member.error || member.state }, healthWords(member));
}

function showEngines(view) {
  const engines = view.members.filter((member) => member.service === "engine");
  const newest = view.run.newest_version;
  const live = engines.filter((member) => member.health === "ok");
  const rate = live.reduce((sum, member) => sum + (member.tokens_per_second || 0), 0);
  const over = isOver(view.run);
  const well = over ? (live.length ? `${live.length} of ${plural(engines.length, "engine")} still up` : "") : `${live.length} of ${plural(engines.length, "engine")} well · ${whole(rate)} tokens/s`;
  setText(byId("engines-note"), engines.length ? well : "");
  const versions = [...new Set(engines.map((member) => member.weight_version))].sort((one, other) => other - one);
  const rows = engines.map((member) => [member.member_id, member.health, member.state, member.weight_version, member.running, member.waiting, Math.round(member.tokens_per_second || 0), Math.floor(member.since_seconds ?? -1)]);
  render(byId("engines"), [rows, newest], () => {
    if (!engines.length) return element("p", { class: "none" }, "No engine has joined the run.");
    const head = ["Engine", "State", "Running", "Waiting", "Tokens/s"].map((name, at) => element("th", { scope: "col", class: at > 1 ? "num" : "" }, name));
    const groups = versions.map((version) => {
      const some = engines.filter((member) => member.weight_version === version);
      const behind = newest - version;
      const note = !version ? "" : behind <= 0 ? "newest" : `${behind} behind`;
      const title = version ? `Version ${whole(version)}` : "No weights yet";
      return element(
        "tbody",
        {},
        element(
          "tr",
          { class: "version" },
          element("th", { scope: "rowgroup", colspan: "5" }, title, note ? element("span", { class: "tag", data: { behind: String(Math.min(behind, 2)) } }, note) : null, element("span", { class: "count" }, plural(some.length, "engine"))),
        ),
        some.map(engineRow),
      );
    });
    return element("table", {}, element("thead", {}, element("tr", {}, head)), groups);
  });
}

function engineRow(member) {
  const full = member.capacity ? Math.min(1, member.running / member.capacity) : 0;
  return element(
    "tr",
    { class: member.health === "ok" ? "" : "unwell" },
    element("th", { scope: "row" }, member.member_id),
    element("td", {}, healthMark(member)),
    element(
      "td",
      { class: "num" },
      element("span", { class: "meter", style: { "--full": String(full) }, title: member.capacity ? `${member.running} of ${member.capacity}` : "" }),
      whole(member.running),
    ),
    element("td", { class: "num" }, whole(member.waiting)),
    element("td", { class: "num" }, whole(member.tokens_per_second)),
  );
}

function showOthers(members) {
  const others = members.filter((member) => member.service !== "engine");
  render(byId("others"), others.map((member) => [member.member_id, member.health, member.state, Math.floor(member.since_seconds || 0)]), () =>
    others.map((member) => element("li", { data: { health: member.health } }, element("b", {}, member.member_id), " ", healthMark(member))),
  );
}

function showWaits({ waits, run }) {
  const waiting = waits.filter((wait) => wait.waiting_for).length;
  const nobody = isOver(run) ? "The run has ended; nobody waits for anybody." : "No process has said yet what it does.";
  setText(byId("waits-note"), waits.length ? `${waiting} waiting, ${waits.length - waiting} working` : "");
  const some = waits.slice(0, WAITS_SHOWN);
  render(byId("waits"), [nobody, ...some.map((wait) => [wait.member_id, wait.part, wait.doing, wait.waiting_for, Math.floor(wait.seconds)])], () => {
    if (!waits.length) return element("li", { class: "none" }, nobody);
    const rows = some.map((wait) =>
      element(
        "li",
        { data: { waits: String(Boolean(wait.waiting_for)) } },
        element("span", { class: "who" }, element("b", {}, wait.member_id), ` ${wait.part}`),
        element("span", { class: "what" }, wait.waiting_for ? element("em", {}, "waits for ") : null, wait.waiting_for || wait.doing),
        element("span", { class: "since" }, since(Math.max(1, wait.seconds))),
      ),
    );
    if (waits.length > some.length) rows.push(element("li", { class: "none" }, `and ${waits.length - some.length} more`));
    return rows;
  });
}

function showLedger(ledger) {
  if (!ledger) {
    setText(byId("ledger-note"), "");
    return render(byId("ledger"), "none", () => element("p", { class: "none" }, "The ledger has not been read yet."));
  }
  setText(byId("ledger-note"), `${whole(ledger.issued)} of ${plural(ledger.total, "prompt")} issued`);
  render(byId("ledger"), ledger, () => {
    const dropped = Object.entries(ledger.dropped).sort((one, other) => other[1] - one[1]);
    const counts = { ...ledger, uncommitted: ledger.trained - ledger.committed, dropped: dropped.reduce((sum, [, count]) => sum + count, 0) };
    const parts = FATES.map(([name, label, colour]) => [label, counts[name], colour]);
    const shown = parts.filter(([, count]) => count > 0);
    const words = shown.map(([label, count]) => `${label} ${whole(count)}`).join(", ");
    return [
      element(
        "div",
        { class: "stack tall", role: "img", "aria-label": words || "nothing issued yet" },
        shown.map(([label, count, colour]) =>
          element("i", { style: { "--c": `var(--${colour})`, "flex-grow": String(count) }, title: `${label} ${whole(count)}` }),
        ),
      ),
      element("ul", { class: "keys" }, shown.map(([label, count, colour]) => key(label, whole(count), colour))),
      element(
        "p",
        { class: "balance", data: { ok: String(ledger.balanced) } },
        element("b", {}, ledger.balanced ? "Balances" : "Does not balance"),
        ` ${ledger.sentence}`,
      ),
      dropped.length ? reasons(dropped) : null,
      ledger.refused_stale ? element("p", { class: "fine" }, `${plural(ledger.refused_stale, "group")} refused as too old when claimed.`) : null,
    ];
  });
}

function reasons(dropped) {
  const most = dropped[0][1];
  return element(
    "table",
    { class: "reasons" },
    element("caption", {}, "Dropped, by reason"),
    element(
      "tbody",
      {},
      dropped.map(([reason, count]) =>
        element(
          "tr",
          {},
          element("th", { scope: "row" }, reason.replaceAll("_", " ")),
          element("td", { class: "num" }, whole(count)),
          element("td", { class: "wide" }, element("i", { style: { width: `${(100 * count) / most}%` } })),
        ),
      ),
    ),
  );
}

function showAlarms(alarms) {
  render(byId("alarm-list"), alarms, () => {
    if (!alarms.length) return element("li", { class: "calm" }, "Nothing needs your attention.");
    return alarms.map((alarm) =>
      element(
        "li",
        { data: { level: alarm.level } },
        element("p", { class: "alarm-title" }, element("span", { class: "level" }, alarm.level), alarm.title),
        element("p", {}, alarm.text),
        element("p", { class: "knob" }, `What helps: ${alarm.knob}.`),
      ),
    );
  });
}

function showFoot({ telemetry }) {
  const lost = telemetry.dropped ? `, ${whole(telemetry.dropped)} refused` : "";
  setText(byId("foot"), `${plural(telemetry.stored, "span")} stored${lost} since this dashboard started`);
}
