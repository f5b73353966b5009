"""What bounds the run's speed: a sentence from measured waiting, over the last steps."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.telemetry import names
from services.dashboard.queries import BusyView, StepView
from services.dashboard.views import Bound, Verdict

WINDOW_STEPS = 5
"""Steps that the verdict looks back on."""
BOUND_SHARE = 0.4
"""Share of wall time from which a phase is what bounds the run."""
IDLE_SHARE = 0.25
"""Engines that idle more than this wait for the trainer."""

PHASES = {
    "wait_groups": names.SECONDS_WAIT_GROUPS,
    "forward_backward": names.SECONDS_FORWARD_BACKWARD,
    "optimizer": names.SECONDS_OPTIMIZER,
    "publish": names.SECONDS_PUBLISH,
    "checkpoint": names.SECONDS_CHECKPOINT,
}
"""Parts of a step, with the step value that measures each."""


def shares(steps: Sequence[StepView]) -> dict[str, float]:
    """Share of the steps' wall time by phase, the rest as "other"; empty when no time was measured."""
    total = sum(step.values.get(names.SECONDS_STEP) or 0.0 for step in steps)
    if total <= 0:
        return {}
    found = {phase: sum(step.values.get(key) or 0.0 for step in steps) for phase, key in PHASES.items()}
    # Phases may overlap (a checkpoint in the background), so that their sum may be more than the wall time.
    whole = max(total, sum(found.values()))
    result = {phase: seconds / whole for phase, seconds in found.items()}
    result["other"] = max(0.0, 1.0 - sum(result.values()))
    return result


def judge(steps: Sequence[StepView], busy: BusyView, synchronous: bool, engines: bool = True) -> Verdict:
    """The verdict over the newest steps. `busy` is of the same window of time; without `engines` samples are given."""
    part = shares(steps)
    idle = busy.idle_share
    if not part:
        text = "No step has been recorded yet."
        return Verdict(
            kind="none", title="No verdict yet", sentence=text, knob="", num_steps=0, shares={}, engine_idle=None
        )
    over = "the last step" if len(steps) == 1 else f"the last {len(steps)} steps"
    kind, title, sentence, knob = _decide(part, idle, over, synchronous, engines)
    return Verdict(
        kind=kind, title=title, sentence=sentence, knob=knob, num_steps=len(steps), shares=part, engine_idle=idle
    )


def _decide(
    part: dict[str, float], idle: float | None, over: str, synchronous: bool, engines: bool
) -> tuple[Bound, str, str, str]:
    waits, publish, checkpoint = part["wait_groups"], part["publish"], part["checkpoint"]
    trains = part["forward_backward"] + part["optimizer"]
    most = max(waits, trains, publish, checkpoint)
    overlap = (
        "rollout.max_staleness = 1 lets engines and trainer work at the same time" if synchronous and engines else ""
    )
    if publish == most and publish >= BOUND_SHARE:
        text = f"publishing weights took {_percent(publish)} of {over}."
        return "publish", "Publish-bound", text, "weights.transport.name = 'shm', or trainer.lora for smaller updates"
    if checkpoint == most and checkpoint >= BOUND_SHARE:
        text = f"checkpoints took {_percent(checkpoint)} of {over}."
        return "checkpoint", "Checkpoint-bound", text, "a larger trainer.checkpoint_every"
    if waits == most and waits >= BOUND_SHARE:
        text = f"the trainer idled {_percent(waits)} of {over}, waiting for groups"
        text += f"; engines were busy {_percent(1 - idle)} of it." if idle is not None else "."
        more = "more engine.replicas, or a smaller rollout.sampling.max_new_tokens"
        if idle is not None and idle > 0.5:
            more = "a larger rollout.max_in_flight or more reward.workers: the engines idle too"
        if not engines:
            more = "a larger rollout.max_in_flight and rollout.buffer_groups: examples are made into tokens ahead"
        return "rollout", "Rollout-bound", text, "; ".join(filter(None, [more, overlap]))
    if idle is not None and idle >= IDLE_SHARE:
        text = f"engines idled {_percent(idle)} of {over}, waiting for the next weight version"
        text += f"; the trainer waited {_percent(waits)} for groups."
        more = overlap or "a larger rollout.max_staleness, fewer engine.replicas, or a faster trainer"
        return "trainer", "Trainer-bound", text, more
    if trains == most and trains >= BOUND_SHARE and waits < 0.1:
        text = f"forward, backward and optimizer took {_percent(trains)} of {over}"
        text += f"; the trainer waited {_percent(waits)} for groups."
        fewer = ", or fewer engine.replicas" if engines else ""
        return "trainer", "Trainer-bound", text, overlap or f"a faster trainer{fewer}"
    text = f"the trainer waited {_percent(waits)} of {over} for groups"
    text += f", engines idled {_percent(idle)}." if idle is not None else "."
    return "balanced", "Balanced", text, ""


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
