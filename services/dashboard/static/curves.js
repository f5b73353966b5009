// Which curves there are, and the step records as columns for them.

import { Chart } from "./charts.js";
import { byId, duration, number, whole } from "./format.js";

export const PHASES = [
  ["seconds_wait_groups", "wait_groups", "waiting for groups", "wait"],
  ["seconds_forward_backward", "forward_backward", "forward, backward", "train"],
  ["seconds_optimizer", "optimizer", "optimizer", "optimizer"],
  ["seconds_publish", "publish", "publish", "publish"],
  ["seconds_checkpoint", "checkpoint", "checkpoint", "checkpoint"],
  ["seconds_other", "other", "other", "other"],
];

const EVALUATION_COLOURS = ["evaluation", "optimizer", "wait"];

// Between which values the rewards lie, as far as their means and spreads tell: of values from a to b with mean m the
// standard deviation is at most sqrt((m - a)(b - m)).
function bounds(means, spreads, others) {
  const fits = ([low, high]) => others.every((value) => value === null || (value >= low && value <= high)) && means.every((mean, at) => mean === null || (mean >= low && mean <= high && (spreads[at] ?? 0) ** 2 <= (mean - low) * (high - mean) + 1e-6));
  return [[0, 1], [-1, 0], [-1, 1]].find(fits) || [-Infinity, Infinity];
}

export class Curves {
  constructor() {
    this.training = new Map();
    this.evaluations = new Map();
    this.charts = null;
    this.evaluationNames = "";
  }

  clear() {
    this.training.clear();
    this.evaluations.clear();
  }

  add(records) {
    for (const record of records) {
      if (record.kind === "train") this.training.set(record.step, record);
      else {
        if (!this.evaluations.has(record.name)) this.evaluations.set(record.name, new Map());
        this.evaluations.get(record.name).set(record.step, record.values.reward_mean ?? null);
      }
    }
    if (this.training.size) this.draw();
  }

  get last() {
    return this.training.size ? this.training.get(Math.max(...this.training.keys())) : null;
  }

  draw() {
    const names = [...this.evaluations.keys()].sort().join("\n");
    if (!this.charts || names !== this.evaluationNames) {
      this.evaluationNames = names;
      this.make();
    }
    const columns = this.columns();
    for (const chart of this.charts) chart.update(columns);
  }

  columns() {
    const steps = new Set(this.training.keys());
    for (const points of this.evaluations.values()) for (const step of points.keys()) steps.add(step);
    const x = [...steps].sort((one, other) => one - other);
    const records = x.map((step) => this.training.get(step));
    const value = (key) => records.map((record) => record?.values[key] ?? null);
    const columns = { x };
    const keys = ["reward_mean", "loss", "policy_loss", "kl_reference", "entropy", "logprob_gap_mean", "sampler_kl", "staleness_mean", "staleness_max", "preference_accuracy", "preference_margin", "train_tokens_per_second", "groups_refused_stale"];
    for (const key of keys) columns[key] = value(key);
    const spread = value("reward_std");
    const evaluated = [...this.evaluations.values()].flatMap((points) => [...points.values()]);
    const [least, most] = (columns.reward_bounds = bounds(columns.reward_mean, spread, evaluated));
    columns.reward_low = columns.reward_mean.map((mean, at) => (mean === null || spread[at] === null ? null : Math.max(least, mean - spread[at])));
    columns.reward_high = columns.reward_mean.map((mean, at) => (mean === null || spread[at] === null ? null : Math.min(most, mean + spread[at])));
    columns.reward_std = spread;
    columns.generated = records.map((record) => record?.generated_tokens_per_second ?? null);
    const total = value("seconds_step");
    const known = PHASES.slice(0, -1).map(([key]) => (columns[key] = value(key)));
    columns.seconds_other = total.map((seconds, at) =>
      seconds === null ? null : Math.max(0, seconds - known.reduce((sum, column) => sum + (column[at] || 0), 0)),
    );
    for (const [name, points] of this.evaluations) columns[`evaluation:${name}`] = x.map((step) => points.get(step) ?? null);
    return columns;
  }

  make() {
    const evaluations = [...this.evaluations.keys()].sort().map((name, at) => ({
      key: `evaluation:${name}`,
      label: `evaluation ${name}`,
      colour: EVALUATION_COLOURS[at % EVALUATION_COLOURS.length],
      points: true,
    }));
    // Labelled text and preferences have no reward, and what is given cannot be stale.
    const rewarded = this.evaluations.size > 0 || [...this.training.values()].some((record) => "reward_missing" in record.values);
    const plans = {
      reward: {
        title: "Reward",
        note: "mean of a step's trajectories, ± one standard deviation",
        height: 250,
        empty: "no trajectory has had a reward",
        bounds: "reward_bounds",
        series: [{ key: "reward_mean", label: "mean", colour: "reward", band: ["reward_low", "reward_high"], spread: "reward_std" }, ...evaluations],
      },
      seconds: {
        title: "Step time",
        note: "seconds by phase",
        height: 212,
        unit: " s",
        stacked: true,
        series: PHASES.map(([key, , label, colour]) => ({ key, label, colour, format: duration })),
      },
      loss: { title: "Loss", note: "as it is minimized", series: [{ key: "loss", label: "mean of the updates", colour: "train" }] },
      preference: {
        title: "Preferences",
        note: "share of pairs ranked right, and margin",
        optional: true,
        series: [
          { key: "preference_accuracy", label: "ranked right", colour: "reward" },
          { key: "preference_margin", label: "margin", colour: "optimizer" },
        ],
      },
      kl: {
        title: "KL to the reference",
        note: "nat a token",
        optional: true,
        series: [{ key: "kl_reference", label: "mean", colour: "optimizer", fromZero: true }],
      },
      mismatch: {
        title: "Sampler against policy",
        note: "nat a token",
        optional: true,
        log: true,
        series: [
          { key: "logprob_gap_mean", label: "mean gap", colour: "train", alarm: 0.1 },
          { key: "sampler_kl", label: "KL", colour: "optimizer", alarm: 0.01 },
        ],
      },
      entropy: { title: "Entropy", note: "nat a token", series: [{ key: "entropy", label: "mean", colour: "publish", fromZero: true }] },
      throughput: {
        title: "Throughput",
        note: "tokens a second",
        series: [
          { key: "train_tokens_per_second", label: "trained", colour: "train", fromZero: true, format: whole },
          { key: "generated", label: "generated", colour: "wait", format: whole },
        ],
      },
      staleness: {
        title: "Staleness",
        note: "weight versions between sampling and training",
        optional: true,
        series: [
          { key: "staleness_mean", label: "mean", colour: "publish", fromZero: true },
          { key: "staleness_max", label: "largest", colour: "checkpoint", dash: [4, 3], format: number },
        ],
      },
    };
    byId("chart-loss").hidden = !rewarded;
    if (!rewarded) {
      plans.reward = { ...plans.loss, height: 250 };
      delete plans.loss;
    }
    this.charts?.forEach((chart) => chart.destroy());
    this.charts = Object.entries(plans).map(([name, plan]) => {
      byId(`chart-${name}`).replaceChildren();
      return new Chart(byId(`chart-${name}`), plan);
    });
  }
}
