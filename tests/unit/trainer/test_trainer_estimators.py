"""Every estimator: the cases that other systems got wrong, invariances, and numbers written out by hand."""

from __future__ import annotations

import math
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import ConfigError, PluginTable, load_run_file, make_plugin
from paceline.config.check import check
from paceline.plugins import registry
from services.trainer.algorithms.base import TrajectoryTokens
from services.trainer.estimation.rewards import InvalidReward

T = TypeVar("T")
ROOT = Path(__file__).parents[3]
NAMES = registry("estimator").available()
GROUP_RELATIVE = ("dr_grpo", "grpo", "maxrl", "reinforce_plus_plus_baseline", "rloo")
Groups = list[list[float | None]]
GROUPS = st.lists(st.lists(st.one_of(st.none(), st.floats(0, 10)), min_size=1, max_size=6), min_size=1, max_size=6)


def make(name: str, **options: object):
    return make_plugin("estimator", PluginTable.model_validate({"name": name, **options}), "trainer.estimator")


def scalars(name: str, groups: Groups, lengths: list[list[int]] | None = None, **options: object) -> list[list[float]]:
    """Advantage of the first token of each trajectory, whichever kind of estimator it is."""
    return [[float(item[0]) for item in group] for group in tokens(name, groups, lengths, **options)]


def flat(groups: list[list[T]]) -> list[T]:
    return list(chain.from_iterable(groups))


def tokens(
    name: str, groups: Groups, lengths: list[list[int]] | None = None, **options: object
) -> list[list[np.ndarray]]:
    estimator = make(name, **options)
    lengths = lengths or [[2] * len(group) for group in groups]
    if not hasattr(estimator, "token_advantages"):
        values = estimator.advantages(groups).values
        return [[np.full(n, v) for n, v in zip(*pair, strict=True)] for pair in zip(lengths, values, strict=True)]
    return estimator.token_advantages(trajectories(groups, lengths)).values


def trajectories(groups: Groups, lengths: list[list[int]]) -> list[list[TrajectoryTokens]]:
    """With log-probabilities and values that depend on reward, length and place only, so that order plays no part."""
    found = []
    for group, counts in zip(groups, lengths, strict=True):
        found.append([])
        for reward, count in zip(group, counts, strict=True):
            place = np.arange(count) + np.nan_to_num(reward or 0.0, posinf=0.0)
            policy, reference, values = -1 - np.sin(place), -1 - np.cos(place), np.sin(3 * place)
            found[-1].append(TrajectoryTokens(reward, count, policy, reference, values))
    return found


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {"normalize_std": False}, [[-1.5, 0.5, 1.0], [2.0, -2.0]]),
        ("dr_grpo", {}, [[-1.5, 0.5, 1.0], [2.0, -2.0]]),
        ("rloo", {}, [[0 - 2.25, 2 - 1.25, 2.5 - 1.0], [4.0, -4.0]]),
        ("maxrl", {}, [[-1.0, 0.5 / 1.5, 1.0 / 1.5], [1.0, -1.0]]),
        ("reinforce", {}, [[0.0, 2.0, 2.5], [4.0, 0.0]]),
        ("reinforce", {"baseline": "group"}, [[-1.5, 0.5, 1.0], [2.0, -2.0]]),
        ("reinforce", {"baseline": "batch"}, [[-1.7, 0.3, 0.8], [2.3, -1.7]]),
    ],
)
def test_written_out(name: str, options: dict[str, object], expected: list[list[float]]) -> None:
    found = scalars(name, [[0.0, 2.0, 2.5], [4.0, 0.0]], **options)
    for values, numbers in zip(found, expected, strict=True):
        assert values == pytest.approx(numbers, abs=1e-12)


def test_the_baseline_variant_of_reinforce_plus_plus_written_out() -> None:
    groups: Groups = [[0.0, 1.0], [0.0, 4.0]]
    lengths = [[1, 3], [2, 2]]
    weighted = np.repeat([-0.5, 0.5, -2.0, 2.0], [1, 3, 2, 2])
    scale = math.sqrt(weighted.var(ddof=1) + 1e-8)
    found = scalars("reinforce_plus_plus_baseline", groups, lengths)
    assert flat(found) == pytest.approx((np.array([-0.5, 0.5, -2.0, 2.0]) - weighted.mean()) / scale)
    by_trajectory = scalars("reinforce_plus_plus_baseline", groups, lengths, statistics="trajectories")
    scale = math.sqrt(np.var([-0.5, 0.5, -2.0, 2.0], ddof=1) + 1e-8)
    assert flat(by_trajectory) == pytest.approx(np.array([-0.5, 0.5, -2.0, 2.0]) / scale)


def test_equal_groups_stay_put_only_when_the_statistics_are_those_of_trajectories() -> None:
    groups: Groups = [[0.0, 1.0], [1.0, 1.0]]
    lengths = [[1, 3], [2, 2]]
    assert scalars("reinforce_plus_plus_baseline", groups, lengths, statistics="trajectories")[1] == [0.0, 0.0]
    assert scalars("reinforce_plus_plus_baseline", groups, lengths)[1][0] != 0.0


@pytest.mark.parametrize("name", NAMES)
def test_conforms(name: str) -> None:
    """New estimators are covered by being there: shapes kept, missing excluded and counted, pure."""
    estimator = make(name)
    groups: Groups = [[0.0, 1.0, None], [2.0, 2.0], [None], [3.0]]
    lengths = [[2, 1, 3], [1, 4], [2], [2]]
    before = trajectories(groups, lengths)
    if hasattr(estimator, "token_advantages"):
        found = estimator.token_advantages(before)
        shapes = [[item.shape for item in group] for group in found.values]
        assert shapes == [[(n,) for n in group] for group in lengths]
        assert ("values" in estimator.needs) == (found.returns is not None)
    else:
        found = estimator.advantages(groups)
        assert [item.shape for item in found.values] == [(3,), (2,), (1,), (1,)]
    assert found.missing == 2 and found.zero_variance == [False, True, True, True]
    for group, values, repeated in zip(
        groups, tokens(name, groups, lengths), tokens(name, groups, lengths), strict=True
    ):
        assert [bool(np.isnan(item).all()) for item in values] == [value is None for value in group]
        for one, other in zip(values, repeated, strict=True):
            np.testing.assert_array_equal(one, other)
            assert one.dtype == np.float64
    for one, other in zip(flat(before), flat(trajectories(groups, lengths)), strict=True):
        np.testing.assert_array_equal(one.values, other.values, err_msg="the input was written to")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_not_finite_is_refused_by_name(name: str, bad: float) -> None:
    with pytest.raises(InvalidReward, match=r"INVALID_REWARD: group 1 .*trajectory 0: the reward is (nan|inf)"):
        tokens(name, [[0.0, 1.0], [bad, 1.0]])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_go_by(name: str) -> None:
    for groups, lengths in (([], []), ([[None, None]], [[2, 2]]), ([[None]], [[0]]), ([[5.0]], [[0]])):
        for group in tokens(name, groups, lengths):
            assert all(np.isnan(item).all() for item in group) or not any(item.size for item in group)


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_groups_without_differences_get_exact_zeros(name: str) -> None:
    for groups in ([[1.0, 1.0], [0.0, 0.0]], [[0.1, 0.1, 0.1]], [[7.0], [100.0]], [[None, 5.0]], [[0.1], [0.3, 0.3]]):
        found = flat(scalars(name, groups))
        assert all(value == 0.0 for value in found if not math.isnan(value))


@pytest.mark.parametrize("name", GROUP_RELATIVE)
def test_a_sibling_without_an_action_does_not_move_the_baseline(name: str) -> None:
    """Rewards [100, 1] where the first sampled nothing: it has no say, and its sibling is alone."""
    assert scalars(name, [[None, 1.0]], [[1, 2]])[0][1] == 0.0


def test_a_group_of_one_has_a_gradient_where_the_formula_has_no_group() -> None:
    assert scalars("reinforce", [[5.0]]) == [[5.0]]
    assert scalars("reinforce", [[5.0], [3.0]], baseline="batch") == [[1.0], [-1.0]]
    assert scalars("reinforce", [[0.1], [0.1, 0.1]], baseline="batch") == [[0.0], [0.0, 0.0]]
    assert scalars("reinforce_plus_plus", [[5.0], [3.0]])[0][0] > 0


@pytest.mark.parametrize("name", NAMES)
@given(groups=GROUPS, seed=st.integers(0, 100))
def test_neither_the_order_of_groups_nor_that_of_siblings_matters(name: str, groups: Groups, seed: int) -> None:
    random = np.random.default_rng(seed)
    lengths = [[int(n) for n in random.integers(1, 5, len(group))] for group in groups]
    found = tokens(name, groups, lengths)
    order = random.permutation(len(groups))
    inner = [random.permutation(len(group)) for group in groups]
    mixed = tokens(
        name, [[groups[g][i] for i in inner[g]] for g in order], [[lengths[g][i] for i in inner[g]] for g in order]
    )
    for place, number in enumerate(order):
        for one, other in zip([found[number][i] for i in inner[number]], mixed[place], strict=True):
            np.testing.assert_allclose(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", [*GROUP_RELATIVE[:2], "rloo", "reinforce_plus_plus_baseline"])
def test_a_constant_added_to_all_rewards_changes_nothing(name: str) -> None:
    groups: Groups = [[0.0, 1.0, None], [3.0, 1.0]]
    moved: Groups = [[None if value is None else value + 3 for value in group] for group in groups]
    np.testing.assert_allclose(flat(scalars(name, groups)), flat(scalars(name, moved)), atol=1e-9)
    assert not np.allclose(flat(scalars("reinforce", groups)), flat(scalars("reinforce", moved)), equal_nan=True)


def test_the_fewer_succeed_the_more_a_success_weighs() -> None:
    """maxrl: a success has the advantage 1/p - 1, so that the sum over a group is that of log p, not of p."""
    for successes in (1, 2, 4):
        group: list[float | None] = [1.0] * successes + [0.0] * (8 - successes)
        assert scalars("maxrl", [group])[0][0] == pytest.approx(8 / successes - 1)


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(InvalidReward, match=r"group 1 .*reward -1\.0; maxrl"):
        scalars("maxrl", [[0.0, 1.0], [-1.0, 1.0]])


@pytest.mark.parametrize("name", [name for name in NAMES if name != "reinforce_plus_plus"])
def test_a_kl_in_the_reward_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(ConfigError, match=r"kl_coefficient.*a KL in the reward is refused.*trainer\.kl_coefficient"):
        make(name, kl_coefficient=0.1)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.critic.epochs=2"], r"trainer\.critic: .*'grpo' uses no values; leave the table out"),
        (["trainer.estimator.name=ppo"], r"estimator = 'ppo' needs values; add a table \[trainer\.critic\]"),
        (
            ["trainer.estimator.kl_coefficient=0.1"],
            r"^trainer\.estimator: kl_coefficient: a KL in the reward is refused",
        ),
    ],
)
def test_a_run_file_with_a_key_that_would_do_nothing_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check(load_run_file(ROOT / "examples/sort4/run.toml", overrides), data=False)
