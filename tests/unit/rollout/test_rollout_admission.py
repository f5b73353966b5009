"""Admission: no group is issued that must become too old, and none is withheld without a cause a person can read."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.rollout.admission import Bounds, Standing, decide

SYNC = Bounds(groups_per_step=4, steps=5, max_staleness=0, max_in_flight=64, buffer_groups=64)
NOTHING = Standing(counted=0, waiting=0, generating=0, buffered=0, claimed=0, exhausted=False)


def test_synchronous_production_makes_exactly_one_step_for_a_version() -> None:
    assert decide(SYNC, 0, 0, NOTHING).count == 4
    full = replace(NOTHING, counted=4, generating=4)
    assert decide(SYNC, 0, 4, full).count == 0
    assert decide(SYNC, 0, 4, full).cause == "weights of step 1 from the trainer"
    assert decide(SYNC, 1, 0, replace(NOTHING, counted=4)).count == 4
    assert SYNC.gate(7).exact_version == 7


def test_a_dropped_group_is_replaced_and_a_failed_one_is_issued_again() -> None:
    assert decide(SYNC, 0, 3, replace(NOTHING, counted=3, generating=3)).count == 1
    assert decide(SYNC, 0, 3, replace(NOTHING, counted=4, waiting=1, generating=3)).count == 1


def test_bounded_production_runs_ahead_by_the_bound() -> None:
    bounds = replace(SYNC, max_staleness=2)
    assert decide(bounds, 0, 0, NOTHING).count == 12
    assert decide(bounds, 4, 0, replace(NOTHING, counted=20)).finished
    assert bounds.gate(7).min_version == 5
    assert bounds.gate(1).min_version == 1


def test_unbounded_production_is_limited_by_the_run_alone() -> None:
    bounds = replace(SYNC, max_staleness=None)
    assert decide(bounds, 0, 0, NOTHING).count == 20
    assert bounds.gate(7).WhichOneof("gate") is None


def test_what_is_waited_for_is_said() -> None:
    bounds = replace(SYNC, max_staleness=None, max_in_flight=3, buffer_groups=4)
    assert "rollout.max_in_flight" in decide(bounds, 0, 3, replace(NOTHING, counted=3, generating=3)).cause
    assert "room in the stream" in decide(bounds, 0, 0, replace(NOTHING, counted=4, buffered=4)).cause
    assert "every group" in decide(bounds, 0, 0, replace(NOTHING, counted=20)).cause


def test_after_a_rewind_nothing_is_made_until_the_trainer_has_caught_up() -> None:
    """A group of step 6 must not be made with the weights of step 3 that the trainer publishes while it replays."""
    waiting = replace(NOTHING, counted=18, waiting=2)
    replaying = decide(SYNC, 3, 0, waiting)
    assert replaying.count == 0
    assert replaying.cause == "weights of step 4 from the trainer, which replays step 3"
    assert decide(SYNC, 4, 0, waiting).count == 4


def test_a_run_whose_data_is_used_up_is_starved_only_when_nothing_can_come() -> None:
    used_up = replace(NOTHING, counted=18, exhausted=True)
    assert decide(SYNC, 4, 0, used_up).starved
    assert "18 of the 20 groups" in decide(SYNC, 4, 0, used_up).cause
    for open_groups in ({"generating": 1}, {"claimed": 4}, {"buffered": 4}):
        assert not decide(SYNC, 4, 0, replace(used_up, **open_groups)).starved
    assert decide(SYNC, 4, 0, replace(used_up, waiting=1)).count == 1


@given(step=st.integers(0, 6), bound=st.integers(0, 3), counted=st.integers(0, 40), waiting=st.integers(0, 40),
       in_flight=st.integers(0, 70))  # fmt: skip
def test_counts_never_pass_a_bound(step: int, bound: int, counted: int, waiting: int, in_flight: int) -> None:
    bounds = replace(SYNC, max_staleness=bound)
    decision = decide(bounds, step, in_flight, replace(NOTHING, counted=counted, waiting=min(waiting, counted)))
    assert 0 <= decision.count <= max(0, bounds.max_in_flight - in_flight)
    assert decision.ceiling <= bounds.need
    assert bool(decision.count) != bool(decision.cause)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_group_at_the_ceiling_is_consumed_within_the_bound(bound: int) -> None:
    bounds = Bounds(groups_per_step=4, steps=100, max_staleness=bound, max_in_flight=1, buffer_groups=4)
    step_made = 10
    step_consumed = -(-bounds.ceiling(step_made) // bounds.groups_per_step)
    assert (step_consumed - 1) - step_made == bound


def test_in_data_order_each_group_has_a_place_before_it_is_issued() -> None:
    """A full stream must never keep out the group that the trainer waits for."""
    bounds = replace(SYNC, max_staleness=None, buffer_groups=6, in_data_order=True)
    assert decide(bounds, 0, 0, NOTHING).count == 6
    assert decide(bounds, 0, 2, replace(NOTHING, counted=5, generating=2, buffered=3)).count == 1
    full = decide(bounds, 0, 2, replace(NOTHING, counted=6, generating=2, buffered=4))
    assert full.count == 0 and "rollout.buffer_groups" in full.cause
    assert decide(bounds, 0, 0, replace(NOTHING, counted=6, waiting=2, buffered=6)).count == 2
