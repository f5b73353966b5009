"""The verdict names what bounds the run, from measured waiting, and never more than was measured."""

from __future__ import annotations

import pytest

from paceline.telemetry import names
from services.dashboard.queries import BusyView, StepView
from services.dashboard.verdict import judge, shares


def step(number: int, **seconds: float) -> StepView:
    values = {f"seconds_{phase}": value for phase, value in seconds.items()}
    values.setdefault(names.SECONDS_STEP, sum(seconds.values()))
    return StepView(
        kind="train", name="", step=number, revision=number, time=1000.0 + number, weight_version=number + 1,
        trace_id="", values=values,
    )  # fmt: skip


def busy(idle: float | None) -> BusyView:
    return BusyView(samples=10 if idle is not None else 0, idle_share=idle, tokens_per_second=None)


def steps(**seconds: float) -> list[StepView]:
    return [step(number, **seconds) for number in range(1, 6)]


def test_trainer_that_waits_for_groups_is_rollout_bound() -> None:
    verdict = judge(steps(wait_groups=7, forward_backward=2, optimizer=1), busy(0.05), synchronous=False)
    assert verdict.kind == "rollout"
    assert "idled 70 % of the last 5 steps, waiting for groups" in verdict.sentence
    assert "engines were busy 95 %" in verdict.sentence
    assert "engine.replicas" in verdict.knob


def test_engines_that_wait_for_weights_are_trainer_bound() -> None:
    verdict = judge(steps(wait_groups=0.5, forward_backward=8, optimizer=1.5), busy(0.62), synchronous=False)
    assert verdict.kind == "trainer"
    assert "engines idled 62 % of the last 5 steps, waiting for the next weight version" in verdict.sentence
    assert "max_staleness" in verdict.knob


def test_rollout_bound_with_idle_engines_points_at_what_lies_between() -> None:
    verdict = judge(steps(wait_groups=8, forward_backward=2), busy(0.9), synchronous=False)
    assert verdict.kind == "rollout"
    assert "reward.workers" in verdict.knob


def test_synchronous_run_is_told_about_overlap() -> None:
    verdict = judge(steps(wait_groups=6, forward_backward=4), busy(0.4), synchronous=True)
    assert "rollout.max_staleness = 1" in verdict.knob


@pytest.mark.parametrize("phase", ["publish", "checkpoint"])
def test_publication_or_checkpoint_can_be_what_bounds(phase: str) -> None:
    verdict = judge(steps(wait_groups=1, forward_backward=2, **{phase: 6}), busy(0.5), synchronous=False)
    assert verdict.kind == phase
    assert "67 % of the last 5 steps" in verdict.sentence


def test_neither_side_waits_much_is_balanced() -> None:
    verdict = judge(steps(wait_groups=2, forward_backward=5, optimizer=1, publish=2), busy(0.1), synchronous=False)
    assert verdict.kind == "balanced"
    assert "waited 20 %" in verdict.sentence and "idled 10 %" in verdict.sentence


def test_engines_that_were_not_sampled_are_not_spoken_of() -> None:
    verdict = judge(steps(wait_groups=0.1, forward_backward=9), busy(None), synchronous=False)
    assert verdict.kind == "trainer"
    assert "engine" not in verdict.sentence


def test_no_step_is_no_verdict() -> None:
    verdict = judge([], busy(None), synchronous=True)
    assert verdict.kind == "none" and verdict.shares == {}


def test_shares_sum_to_one_also_when_phases_overlap() -> None:
    overlapping = [step(1, forward_backward=8, checkpoint=4, step=10)]
    assert sum(shares(overlapping).values()) == pytest.approx(1)
    part = shares([step(1, wait_groups=2, forward_backward=5, step=10)])
    assert part["other"] == pytest.approx(0.3)


def test_without_engines_no_knob_of_theirs_is_named() -> None:
    for parts in ({"wait_groups": 8, "forward_backward": 2}, {"wait_groups": 0.5, "forward_backward": 9}):
        verdict = judge(steps(**parts), busy(None), synchronous=True, engines=False)
        assert verdict.knob
        assert not any(word in verdict.knob for word in ("engine", "staleness", "reward", "sampling"))
