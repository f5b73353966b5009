"""Leave-one-out advantages: the baseline of a trajectory is the mean reward of its siblings, and so is unbiased."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plugins import registry
from services.trainer.algorithms.base import Advantages, Rewards
from services.trainer.estimation.rewards import OptionsWithoutKl, by_group


@registry("estimator").register("rloo")
class Rloo:
    """A_i = R_i - mean of R_j over the siblings j != i that have a reward = n / (n - 1) (R_i - mean_group(R)).

    Source: Kool et al. 2019, "Buy 4 REINFORCE Samples, Get a Baseline for Free!"; arXiv:2402.14740, section 2.2.
    float64. A group of one has no sibling, and gets an exact zero, as do groups of equal rewards.
    """

    class Options(OptionsWithoutKl):
        """The estimator has none."""

    def __init__(self, options: Options) -> None:
        pass

    def advantages(self, groups: Sequence[Rewards]) -> Advantages:
        """See Estimator.advantages."""
        return by_group(groups, lambda rewards: (rewards - rewards.mean()) * rewards.size / (rewards.size - 1))
