// Loads what there is, then follows the live stream. A lost connection is shown and taken up again where it broke.

import { Curves } from "./curves.js";
import { byId, setText, since } from "./format.js";
import { Groups } from "./groups.js";
import { showOverview } from "./panels.js";

const QUIET_SECONDS = 5;

const curves = new Curves();
const groups = new Groups();
let heard = 0;
let spans = -1;
let revision = 0;

function take(view) {
  heard = Date.now();
  showOverview(view, curves.last);
  if (view.telemetry.stored !== spans) {
    spans = view.telemetry.stored;
    groups.refresh();
  }
}

function takeSteps(records) {
  for (const record of records) revision = Math.max(revision, record.revision);
  // Charts measure their cards, so these must be visible first.
  if (records.length) byId("curves").hidden = false;
  curves.add(records);
}

async function load() {
  const [steps, overview] = await Promise.all([fetch("api/steps"), fetch("api/overview")]);
  curves.clear();
  takeSteps(await steps.json());
  take(await overview.json());
}

function follow() {
  const stream = new EventSource(`api/live?after=${revision}`);
  stream.addEventListener("steps", (event) => takeSteps(JSON.parse(event.data)));
  stream.addEventListener("overview", (event) => take(JSON.parse(event.data)));
  stream.addEventListener("reset", () => curves.clear());
  // The browser reconnects by itself unless the answer was an error.
  stream.addEventListener("error", () => {
    if (stream.readyState === EventSource.CLOSED) setTimeout(follow, 2000);
  });
}

function showLink() {
  const silent = (Date.now() - heard) / 1000;
  const link = byId("link");
  const lost = heard && silent > QUIET_SECONDS;
  link.dataset.state = !heard ? "wait" : lost ? "lost" : "live";
  document.body.classList.toggle("lost", Boolean(lost));
  setText(link, !heard ? "connecting" : lost ? `no answer for ${since(silent)}` : "live");
}

async function start() {
  setInterval(showLink, 1000);
  for (;;) {
    try {
      await load();
      break;
    } catch {
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
  }
  showLink();
  follow();
}

start();
