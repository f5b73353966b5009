"""The overview tells what is wrong, who is gone and what is awaited, for runs made up on the spot."""

from __future__ import annotations

import time
from typing import Any

import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.config import RunFile, parse
from paceline.rpc.status import StatusBoard, timestamp
from paceline.telemetry import names
from services.dashboard.overview import Recent, build, ledger_view
from services.dashboard.queries import BusyView, StepView
from services.dashboard.state import LiveState
from services.dashboard.store import Counters
from services.dashboard.views import Overview

NOBODY = BusyView(samples=0, idle_share=None, tokens_per_second=None)


def config() -> RunFile:
    return parse({
        "run": {"name": "r", "steps": 40}, "model": {"path": "models/tiny"},
        "data": {"source": {"name": "jsonl", "path": "p"}}, "reward": {"graders": [{"name": "exact_match"}]},
    })  # fmt: skip


def healthy(**values: float | None) -> dict[str, float | None]:
    return {
        names.SECONDS_STEP: 4.0, names.SECONDS_WAIT_GROUPS: 1.0, names.LOSS: 0.1, names.GRAD_NORM: 1.0,
        names.GROUPS_TRAINED: 8.0, names.SAMPLES_TRAINED: 64.0, names.LOGPROB_GAP_MEAN: 0.001, **values,
    }  # fmt: skip


def recent(count: int = 5, age: float = 1.0, **values: float | None) -> Recent:
    now = time.time()
    steps = []
    for number in range(1, count + 1):
        step = StepView(
            kind="train", name="", step=number, revision=number, time=now - age - 4 * (count - number),
            weight_version=number + 1, trace_id="", values=healthy(**values),
        )  # fmt: skip
        steps.append(step)
    return Recent(steps, NOBODY, count)


def live(*members: str, state: int = pb.RUN_STATE_ACTIVE) -> LiveState:
    found = LiveState("r", run=pb.Run(run_id="r", state=state, num_steps=40), newest_version=6)  # type: ignore[arg-type]
    found.run.created_time.CopyFrom(timestamp(time.time() - 100))
    found.steps_source.reached()
    found.set_members([member(name) for name in members])
    for item in found.members.values():
        item.source.reached()
    return found


def member(name: str, state: str = "READY") -> pb.Member:
    return pb.Member(member_id=name, service=name.rpartition("-")[0], state=state, incarnation="1", weight_version=6)


def overview(state: LiveState, steps: Recent) -> Overview:
    return build(state, config(), steps, Counters())


def titles(view: Overview) -> list[str]:
    return [alarm.title for alarm in view.alarms]


def test_a_run_without_trouble_has_no_alarm() -> None:
    view = overview(live("engine-0", "trainer-0"), recent())
    assert view.alarms == []
    assert view.run.step == 5 and view.run.num_steps == 40 and view.run.state == "active"
    assert view.run.eta_seconds == pytest.approx(35 * 4.0)
    assert view.run.elapsed_seconds == pytest.approx(100, abs=5)
    assert view.awaiting == ""


@pytest.mark.parametrize(
    ("values", "title", "knob"),
    [
        ({names.GROUPS_ZERO_VARIANCE: 5.0}, "Groups without variance", "nonzero_std"),
        ({names.TRUNCATED_FRACTION: 0.3}, "Truncated samples", "max_new_tokens"),
        ({names.REWARD_MISSING: 4.0, names.REWARD_MEAN: 0.5}, "Missing rewards", "reward.timeout_seconds"),
        ({names.REWARD_MISSING: 64.0, names.SAMPLES_TRAINED: 0.0}, "No rewards", "paceline logs -s reward"),
        ({names.LOGPROB_GAP_MEAN: 0.2}, "Sampler and policy mismatch", "dtype"),
        ({names.SAMPLER_KL: 0.02}, "Sampler and policy mismatch", "tis"),
        ({names.LOSS: None}, "Loss is not finite", "learning_rate"),
    ],
)
def test_numbers_of_steps_raise_their_alarm_with_a_knob(values: dict[str, Any], title: str, knob: str) -> None:
    view = overview(live("trainer-0"), recent(**values))
    assert titles(view) == [title]
    assert knob in view.alarms[0].knob


def test_a_stalled_run_names_who_waits_for_whom() -> None:
    state = live("trainer-0", "rollout-0")
    board = StatusBoard("trainer", "trainer-0", "1", "r", state="READY")
    with board.activity("loop").waiting("8 groups of step 6 (3 are there)"):
        state.members["trainer-0"].status = board.snapshot()
    view = overview(state, recent(age=90))
    assert titles(view) == ["Stalled"]
    assert "trainer-0 waits for 8 groups of step 6 (3 are there)" in view.alarms[0].text
    assert view.waits[0].member_id == "trainer-0"


def test_a_finished_run_is_not_stalled_and_misses_nobody() -> None:
    state = live("trainer-0", state=pb.RUN_STATE_FINISHED)
    state.set_members([])
    view = overview(state, recent(age=900))
    assert view.alarms == [] and view.run.eta_seconds is None


def test_what_left_with_the_run_has_ended_and_nobody_waits_any_more() -> None:
    state = live("trainer-0", "engine-0", "engine-1", state=pb.RUN_STATE_FINISHED)
    assert state.run is not None
    board = StatusBoard("engine", "engine-1", "1", "r", state="READY")
    with board.activity("weights").waiting("a weight version after 6"):
        state.members["engine-1"].status = board.snapshot()
    state.run.finished_time.CopyFrom(timestamp(time.time() - 3))
    state.set_members([member("engine-0"), member("engine-1")])
    silent = state.members["engine-0"].source
    silent.failed("UNAVAILABLE: connection refused")
    silent.since = time.time() - 5
    view = overview(state, recent(age=5))
    assert {item.member_id: item.health for item in view.members} == {
        "trainer-0": "ended", "engine-0": "ended", "engine-1": "ok",
    }  # fmt: skip
    assert view.alarms == [] and view.waits == []


def test_what_was_lost_long_before_the_end_is_told_apart() -> None:
    state = live("engine-0", state=pb.RUN_STATE_FINISHED)
    assert state.run is not None
    state.run.finished_time.CopyFrom(timestamp(time.time()))
    state.set_members([])
    state.members["engine-0"].gone_since = time.time() - 100
    (gone,) = overview(state, recent()).members
    assert gone.health == "ended" and gone.since_seconds == pytest.approx(100, abs=3)


def test_a_run_that_ended_before_a_step_says_why() -> None:
    state = live("trainer-0", state=pb.RUN_STATE_FAILED)
    assert state.run is not None
    state.run.reason = "no data"
    assert overview(state, recent(0)).awaiting == "The run has ended without a step: no data"


def test_a_member_that_went_without_a_word_is_lost_and_one_that_drained_has_left() -> None:
    state = live("engine-0", "engine-1")
    state.set_members([member("engine-0"), member("engine-1", "DRAINING")])
    state.set_members([])
    view = overview(state, recent())
    assert {item.member_id: item.health for item in view.members} == {"engine-0": "lost", "engine-1": "left"}
    assert titles(view) == ["engine-0 is gone"]


def test_a_member_that_comes_back_is_well_again() -> None:
    state = live("engine-0")
    state.set_members([])
    again = member("engine-0")
    again.incarnation = "2"
    state.set_members([again])
    state.members["engine-0"].source.reached()
    assert overview(state, recent()).members[0].health == "ok"


def test_a_frozen_process_is_silent_with_the_reason() -> None:
    state = live("engine-0")
    state.members["engine-0"].source.failed("DEADLINE_EXCEEDED: no answer")
    state.members["engine-0"].source.since = time.time() - 12
    view = overview(state, recent())
    assert view.members[0].health == "silent"
    assert "12 s: DEADLINE_EXCEEDED" in view.alarms[0].text


def test_engines_are_in_natural_order_and_those_that_lag_are_named() -> None:
    state = live("engine-10", "engine-2")
    for name, version in (("engine-10", 6), ("engine-2", 3)):
        load = engine_pb.GetLoadResponse(weight_version=version)
        load.ranks.add(num_running=3, num_waiting=1, capacity=8, tokens_per_second=100)
        load.ranks.add(num_running=2, num_waiting=0, capacity=8, tokens_per_second=50)
        state.members[name].load = load
    view = overview(state, recent())
    assert [item.member_id for item in view.members] == ["engine-2", "engine-10"]
    assert (view.members[0].running, view.members[0].waiting, view.members[0].tokens_per_second) == (5, 1, 150)
    assert titles(view) == ["engine-2 lags"] and view.members[0].behind == 3


def test_an_empty_run_says_what_it_waits_for() -> None:
    nothing = recent(0)
    unreached = LiveState("r")
    unreached.steps_source.failed("UNAVAILABLE: connection refused")
    assert "coordinator: UNAVAILABLE" in overview(unreached, nothing).awaiting
    assert "engine, router, reward to join" in overview(live("trainer-0", "rollout-0"), nothing).awaiting
    everyone = live("trainer-0", "rollout-0", "engine-0", "router-0", "reward-0")
    everyone.members["engine-0"].member.state = "SYNCING"
    assert overview(everyone, nothing).awaiting == "Waiting for engine-0 to get ready."


def test_the_ledger_says_whether_it_balances() -> None:
    account = {
        "issued": 1240, "waiting": 4, "generating": 100, "buffered": 80, "claimed": 20, "trained": 1024,
        "committed": 1000, "dead": 0, "refused_stale": 0, "total": 5000, "in_flight": 204, "balanced": True,
        "dropped": {"zero_variance": 12}, "imbalances": [],
    }  # fmt: skip
    good = ledger_view(account)
    assert good.sentence == "issued 1,240 = trained 1,024 + dropped 12 + dead 0 + in flight 204"
    bad = {**account, "trained": 1020, "balanced": False, "imbalances": ["issued is 1240, but accounted is 1236"]}
    state = live("trainer-0")
    state.account = bad
    view = overview(state, recent())
    assert titles(view) == ["The ledger does not balance"]
    assert "≠" in view.alarms[0].text and "1236" in view.alarms[0].text
