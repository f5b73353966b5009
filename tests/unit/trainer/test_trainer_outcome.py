"""The sentence with which a run ends tells what it trained on."""

from __future__ import annotations

from services.trainer.run.outcome import outcome_of


def test_a_run_that_trained_is_finished() -> None:
    records = [{"reward_missing": 3, "reward_mean": 0.5, "optimizer_updates": 1}, {"reward_missing": 8}]
    assert (outcome_of(records, 2).reason, outcome_of(records, 2).failed) == ("trained 2 steps", False)


def test_a_run_without_one_reward_has_failed() -> None:
    outcome = outcome_of([{"reward_missing": 700, "optimizer_updates": 0}] * 2, 2)
    assert outcome.failed and outcome.reason.startswith("not one of the 1,400 trajectories of 2 steps had a reward")


def test_a_run_of_equal_rewards_went_through_without_an_update() -> None:
    record = {"reward_missing": 0, "reward_mean": 1.0, "optimizer_updates": 0, "groups_trained": 4}
    outcome = outcome_of([{**record, "groups_zero_variance": 4}], 1)
    assert not outcome.failed and "without one update: 4 of 4 groups had equal rewards" in outcome.reason


def test_samples_that_never_have_rewards_are_no_failure() -> None:
    assert not outcome_of([{"reward_missing": 0, "loss": 1.0}], 1).failed
