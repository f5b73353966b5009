"""Maximum-likelihood advantages: the fewer trajectories of a group succeed, the more each success weighs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.plugins import registry
from services.trainer.algorithms.base import Advantages, Rewards
from services.trainer.estimation.rewards import InvalidReward, OptionsWithoutKl, by_group


@registry("estimator").register("maxrl")
class MaxRl:
    """A_i = (R_i - mean_group(R)) / mean_group(R), in float64.

    Source: Maximum Likelihood Reinforcement Learning, arXiv:2602.02710: with rewards of 0 and 1 the mean of A_i grad
    log p over a group estimates the gradient of log(pass rate), truncated at the size of the group. Rewards must not
    be negative (InvalidReward). Groups of one, of equal rewards and without a success get exact zeros.
    """

    class Options(OptionsWithoutKl):
        """The estimator has none."""

    def __init__(self, options: Options) -> None:
        pass

    def advantages(self, groups: Sequence[Rewards]) -> Advantages:
        """See Estimator.advantages."""
        for number, rewards in enumerate(groups):
            lowest = min((value for value in rewards if value is not None), default=0.0)
            if lowest < 0:
                raise InvalidReward(
                    f"group {number} of the step has the reward {lowest}; maxrl divides by the mean reward as a pass "
                    "rate, so rewards must be 0 or more; use grpo, or grade failures with 0"
                )
        return by_group(groups, _relative)


def _relative(rewards: np.ndarray) -> np.ndarray:
    mean = rewards.mean()
    return (rewards - mean) / mean
