"""What a run came to: the table at its end, and runs/<name>/summary.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from paceline import files
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.cli.observe import RunView
from paceline.ledger import Account
from paceline.telemetry import names

FIRST_STEPS = 2
LAST_STEPS = 4


def _mean(values: list[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _figure(value: float | None, form: str) -> str:
    return "none" if value is None else f"{value:{form}}"


def summarize(view: RunView, account: Account, seconds: float) -> dict[str, Any]:
    """The figures of a run. reward_first is the mean of the first two steps, reward_last of the last four.

    None stands for what was not measured: a run without any reward has no mean of them.
    """
    rewards, losses = view.values(names.REWARD_MEAN), view.values(names.LOSS)
    generated, busy = 0.0, 0.0
    for status in view.statuses.values():
        if status is not None and status.service == "engine":
            generated += status.gauges.get("generated_tokens_total", 0.0)
            busy += status.gauges.get("busy_seconds_total", 0.0)
    gaps = view.values(names.LOGPROB_GAP_MAX)
    staleness = view.values(names.STALENESS_MAX)
    return {
        "state": pb.RunState.Name(view.run.state).removeprefix("RUN_STATE_").lower() if view.run else "unknown",
        "reason": view.run.reason if view.run else "",
        "reward_first": _mean(rewards[:FIRST_STEPS]),
        "reward_last": _mean(rewards[-LAST_STEPS:]),
        "loss_first": _mean(losses[:FIRST_STEPS]),
        "loss_last": _mean(losses[-LAST_STEPS:]),
        "preference_accuracy_last": _mean(view.values(names.PREFERENCE_ACCURACY)[-LAST_STEPS:]),
        "seconds": seconds,
        "steps": len(view.records),
        "generated_tokens_per_second": generated / busy if busy else None,
        "train_tokens_per_second": _mean(view.values(names.TRAIN_TOKENS_PER_SECOND)),
        "logprob_gap_mean": _mean(view.values(names.LOGPROB_GAP_MEAN)),
        "logprob_gap_max": max(gaps, default=None),
        "sampler_kl": _mean(view.values(names.SAMPLER_KL)),
        "staleness_max": int(max(staleness, default=0)),
        "prompts_issued": account.issued,
        "prompts_trained": account.trained,
        "prompts_dropped": sum(account.dropped.values()),
        "prompts_dead": account.dead,
        "prompts_in_flight": account.in_flight,
        "ledger_balanced": account.balanced,
        "seconds_by_phase": {
            phase: sum(view.values(key))
            for phase, key in (
                ("waiting for groups", names.SECONDS_WAIT_GROUPS),
                ("forward and backward", names.SECONDS_FORWARD_BACKWARD),
                ("optimizer", names.SECONDS_OPTIMIZER),
                ("publication", names.SECONDS_PUBLISH),
                ("checkpoints", names.SECONDS_CHECKPOINT),
            )
        },
    }


def write(summary: dict[str, Any], directory: Path) -> Path:
    """Write summary.json, whole or not at all."""
    path = directory / "summary.json"
    files.replace(path, json.dumps(summary, indent=2) + "\n")
    return path


def show(console: Console, summary: dict[str, Any], view: RunView) -> None:
    """Print the table."""
    table = Table(title="Result", title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    reward = _course(summary, "reward", ".2f", len(view.values(names.REWARD_MEAN)))
    if summary["reward_first"] is None:
        missing = sum(view.values(names.REWARD_MISSING))
        reward = f"[red]none: {missing:,.0f} trajectories, each without one[/]" if missing else "none"
    if view.values(names.REWARD_MISSING):
        table.add_row("reward", reward)
    else:
        _add_losses(table, summary, len(view.values(names.LOSS)))
    for (name, step), record in sorted(view.evaluations.items()):
        table.add_row(f"evaluation {name}, step {step}", _figure(record.values.get(names.REWARD_MEAN), ".2f"))
    table.add_row("steps", f"{summary['steps']} in {summary['seconds']:.0f} s, the start of the services included")
    if generated := summary["generated_tokens_per_second"]:
        table.add_row("generation", f"{generated:.0f} tokens/s of engine time")
    if (trained := summary["train_tokens_per_second"]) is not None:
        table.add_row("training", f"{trained:.0f} trained tokens/s of trainer time")
    phases = ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in summary["seconds_by_phase"].items())
    table.add_row("trainer's time", phases)
    gap = ", ".join(
        f"{label} {_figure(summary[key], form)}"
        for label, key, form in (
            ("mean", "logprob_gap_mean", ".4f"), ("max", "logprob_gap_max", ".3f"), ("KL", "sampler_kl", ".5f"),
        )
    )  # fmt: skip
    if summary["logprob_gap_mean"] is not None:
        table.add_row("sampler to policy log-probabilities", gap)
        table.add_row("largest staleness", str(summary["staleness_max"]))
    balance = "balances" if summary["ledger_balanced"] else "[red]does not balance[/]"
    table.add_row(
        "ledger",
        f"{balance}: {summary['prompts_issued']} issued = {summary['prompts_trained']} trained + "
        f"{summary['prompts_dropped']} dropped + {summary['prompts_dead']} dead + "
        f"{summary['prompts_in_flight']} in flight",
    )
    console.print(table)


def _course(summary: dict[str, Any], key: str, form: str, num_steps: int) -> str:
    """From the first steps to the last; a run with fewer steps than that has fewer to average."""
    early, late = _steps("first", FIRST_STEPS, num_steps), _steps("last", LAST_STEPS, num_steps)
    first, last = _figure(summary[f"{key}_first"], form), _figure(summary[f"{key}_last"], form)
    return f"{first} ({early}) to [bold]{last}[/] ({late})"


def _steps(which: str, most: int, num_steps: int) -> str:
    number = min(most, num_steps)
    return f"{which} step" if number == 1 else f"{which} {number} steps"


def _add_losses(table: Table, summary: dict[str, Any], num_steps: int) -> None:
    """What a run of labelled examples or preferences came to."""
    table.add_row("loss", _course(summary, "loss", ".4f", num_steps))
    if (accuracy := summary["preference_accuracy_last"]) is not None:
        table.add_row("preferences", f"{accuracy:.2f} rated right ({_steps('last', LAST_STEPS, num_steps)})")
