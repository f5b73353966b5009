"""Advantages of tokens against loops that are written as the papers' formulas are."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.algorithms.base import TrajectoryTokens
from services.trainer.algorithms.ppo import Ppo
from services.trainer.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from services.trainer.estimation.discounting import discounted_sums
from services.trainer.estimation.whitening import whiten


def ppo(**options: object) -> Ppo:
    return Ppo(Ppo.Options.model_validate(options))


def plus_plus(**options: object) -> ReinforcePlusPlus:
    return ReinforcePlusPlus(ReinforcePlusPlus.Options.model_validate(options))


def gae_by_loop(reward: float, values: list[float], gamma: float, lam: float) -> list[float]:
    found, carry = [], 0.0
    for k in reversed(range(len(values))):
        following = values[k + 1] if k + 1 < len(values) else 0.0
        delta = (reward if k == len(values) - 1 else 0.0) + gamma * following - values[k]
        carry = delta + gamma * lam * carry
        found.insert(0, carry)
    return found


def returns_by_loop(reward: float, penalties: np.ndarray, gamma: float) -> list[float]:
    found, carry = [], 0.0
    for k in reversed(range(len(penalties))):
        carry = -penalties[k] + (reward if k == len(penalties) - 1 else 0.0) + gamma * carry
        found.insert(0, carry)
    return found


@settings(deadline=None)
@given(st.integers(0, 700), st.sampled_from([0.0, 1e-3, 0.5, 0.95, 0.999, 1.0]), st.integers(0, 1000))
def test_discounted_sums_are_those_of_a_loop(count: int, factor: float, seed: int) -> None:
    values = np.random.default_rng(seed).normal(size=count)
    expected, carry = np.empty(count), 0.0
    for k in reversed(range(count)):
        carry = values[k] + factor * carry
        expected[k] = carry
    np.testing.assert_allclose(discounted_sums(values, factor), expected, rtol=1e-11, atol=1e-11)


def test_gae_written_out() -> None:
    tokens = TrajectoryTokens(1.0, 3, values=np.array([0.5, 0.2, 0.4]))
    found = ppo(gamma=0.9, gae_lambda=0.5, whiten=False).token_advantages([[tokens]])
    last = 1.0 - 0.4
    middle = 0.9 * 0.4 - 0.2 + 0.45 * last
    first = 0.9 * 0.2 - 0.5 + 0.45 * middle
    np.testing.assert_allclose(found.values[0][0], [first, middle, last], atol=1e-15)
    assert found.returns is not None
    np.testing.assert_allclose(found.returns[0][0], [first + 0.5, middle + 0.2, last + 0.4], atol=1e-15)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (1.0, 0.0), (0.0, 0.9), (0.9, 1.0)])
def test_gae_is_that_of_a_loop(gamma: float, lam: float) -> None:
    random = np.random.default_rng(1)
    groups = [
        [TrajectoryTokens(float(random.normal()), n, values=random.normal(size=n)) for n in lengths]
        for lengths in ([1, 300, 17], [128, 129, 256])
    ]
    found = ppo(gamma=gamma, gae_lambda=lam, whiten=False).token_advantages(groups)
    white = ppo(gamma=gamma, gae_lambda=lam).token_advantages(groups)
    flat = np.concatenate([item for group in found.values for item in group])
    for g, group in enumerate(groups):
        for t, item in enumerate(group):
            assert item.values is not None and item.reward is not None and found.returns and white.returns
            expected = gae_by_loop(item.reward, list(item.values), gamma, lam)
            np.testing.assert_allclose(found.values[g][t], expected, rtol=1e-10, atol=1e-10)
            scaled = (found.values[g][t] - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)
            np.testing.assert_allclose(white.values[g][t], scaled, rtol=1e-10, atol=1e-10)
            np.testing.assert_array_equal(white.returns[g][t], found.returns[g][t])


def test_with_gamma_and_lambda_1_the_return_is_the_reward_whatever_the_values() -> None:
    values = np.array([3.0, -2.0, 0.5])
    found = ppo(whiten=False).token_advantages([[TrajectoryTokens(2.0, 3, values=values)]])
    assert found.returns is not None
    np.testing.assert_allclose(found.returns[0][0], [2.0, 2.0, 2.0])
    np.testing.assert_allclose(found.values[0][0], 2.0 - values)


def test_a_trajectory_without_reward_or_tokens_takes_no_part_in_ppo() -> None:
    one = TrajectoryTokens(1.0, 2, values=np.array([0.1, 0.3]))
    other = TrajectoryTokens(0.0, 2, values=np.array([0.0, 0.2]))
    alone = ppo().token_advantages([[one, other]])
    among = ppo().token_advantages(
        [[TrajectoryTokens(None, 3, values=np.ones(3)), one, TrajectoryTokens(9.0, 0, values=np.empty(0)), other]]
    )
    assert among.missing == 1 and np.isnan(among.values[0][0]).all() and among.values[0][2].size == 0
    np.testing.assert_array_equal(among.values[0][1], alone.values[0][0])
    np.testing.assert_array_equal(among.values[0][3], alone.values[0][1])


def test_ppo_without_values_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match=r"\[trainer\.critic\]"):
        ppo().token_advantages([[TrajectoryTokens(1.0, 2)]])


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_reinforce_plus_plus_is_a_whitened_return_with_the_kl_in_the_reward(kind: str, gamma: float) -> None:
    random = np.random.default_rng(2)
    group = [
        TrajectoryTokens(reward, n, random.normal(-2, 1, n), random.normal(-2, 1, n))
        for reward, n in ((1.0, 200), (0.0, 3), (0.5, 130))
    ]
    estimator = plus_plus(gamma=gamma, kl_coefficient=0.1, kl_kind=kind)
    assert estimator.needs == {"policy_logprobs", "reference_logprobs"}
    kl = {"k1": lambda x: x, "k2": lambda x: x**2 / 2, "k3": lambda x: np.exp(-x) - 1 + x}[kind]
    expected = []
    for item in group:
        assert item.policy_logprobs is not None and item.reference_logprobs is not None and item.reward is not None
        expected.append(returns_by_loop(item.reward, 0.1 * kl(item.policy_logprobs - item.reference_logprobs), gamma))
    flat = np.concatenate(expected)
    for found, values in zip(estimator.token_advantages([group]).values[0], expected, strict=True):
        np.testing.assert_allclose(found, (values - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8), atol=1e-9)


def test_reinforce_plus_plus_without_a_kl_needs_no_pass() -> None:
    estimator = plus_plus()
    assert estimator.needs == frozenset()
    found = estimator.token_advantages([[TrajectoryTokens(1.0, 1), TrajectoryTokens(0.0, 3)]])
    flat = np.array([1.0, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(np.concatenate(found.values[0]), (flat - 0.25) / np.sqrt(flat.var(ddof=1) + 1e-8))


def test_equal_returns_become_exact_zeros() -> None:
    found = plus_plus().token_advantages([[TrajectoryTokens(0.1, 3), TrajectoryTokens(0.1, 4)]])
    assert not np.concatenate(found.values[0]).any()


def test_whitening_is_exact_where_a_difference_of_squares_would_not_be() -> None:
    """Far from 0 E[x^2] - E[x]^2 is noise; a constant shift must change nothing."""
    values = [np.array([0.0, 1.0]), np.array([2.0, np.nan])]
    shifted = [item + 2.0**40 for item in values]
    for one, other in zip(whiten(values), whiten(shifted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9)
    assert np.isnan(whiten(values)[1][1])
    assert list(whiten([np.array([0.3])])[0]) == [0.0]
