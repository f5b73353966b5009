"""Group-relative advantages: the cases that other systems got wrong, and properties over random rewards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.algorithms.grpo import Grpo

REWARDS = st.lists(st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=6), min_size=1, max_size=6)


def grpo(**options: object) -> Grpo:
    return Grpo(Grpo.Options.model_validate(options))


def test_written_out() -> None:
    (values,) = grpo(epsilon=1e-12).advantages([[0.0, 1.0, 1.0, 0.0]]).values
    np.testing.assert_allclose(values, np.array([-0.5, 0.5, 0.5, -0.5]) / np.sqrt(1 / 3))


def test_without_std_the_difference_to_the_mean() -> None:
    (values,) = grpo(normalize_std=False).advantages([[0.0, 1.0, 5.0]]).values
    np.testing.assert_allclose(values, [-2.0, -1.0, 3.0])


def test_batch_scope_divides_all_groups_by_one_number() -> None:
    groups = [[0.0, 1.0], [0.0, 4.0]]
    found = grpo(std_scope="batch", epsilon=1e-12).advantages(groups).values
    scale = np.std([-0.5, 0.5, -2.0, 2.0], ddof=1)
    np.testing.assert_allclose(np.concatenate(found), np.array([-0.5, 0.5, -2.0, 2.0]) / scale)


@pytest.mark.parametrize("scope", ["group", "batch"])
def test_equal_rewards_within_groups_give_zeros_even_when_groups_differ(scope: str) -> None:
    found = grpo(std_scope=scope).advantages([[0.0, 0.0], [1.0, 1.0]])
    assert [list(item) for item in found.values] == [[0.0, 0.0], [0.0, 0.0]]
    assert found.zero_variance == [True, True]


def test_equal_rewards_that_do_not_sum_exactly_give_exact_zeros() -> None:
    (values,) = grpo().advantages([[0.1, 0.1, 0.1]]).values
    assert list(values) == [0.0, 0.0, 0.0]


def test_a_missing_reward_is_left_out_and_counted() -> None:
    found = grpo(normalize_std=False).advantages([[None, 0.0, 2.0], [None, None]])
    assert np.isnan(found.values[0][0])
    assert list(found.values[0][1:]) == [-1.0, 1.0]
    assert found.missing == 3
    assert found.zero_variance == [False, True]


def test_a_group_of_one_gets_zero() -> None:
    found = grpo().advantages([[7.0], [None, 100.0]])
    assert found.values[0][0] == 0.0 and found.values[1][1] == 0.0


@given(REWARDS)
def test_advantages_of_a_group_sum_to_zero_and_are_finite(groups: list[list[float | None]]) -> None:
    for scope in ("group", "batch"):
        found = grpo(std_scope=scope).advantages(groups)
        assert found.missing == sum(value is None for group in groups for value in group)
        for group, values in zip(groups, found.values, strict=True):
            present = values[[value is not None for value in group]]
            assert np.isfinite(present).all() and values.dtype == np.float64
            assert abs(present.sum()) < 1e-6
            assert np.isnan(values).sum() == sum(value is None for value in group)


@given(REWARDS, st.floats(-5, 5))
def test_a_constant_added_to_all_rewards_changes_nothing(groups: list[list[float | None]], shift: float) -> None:
    estimator = grpo(normalize_std=False)
    moved = [[None if value is None else value + shift for value in group] for group in groups]
    for one, other in zip(estimator.advantages(groups).values, estimator.advantages(moved).values, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-9)
