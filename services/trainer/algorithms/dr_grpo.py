"""Group-relative advantages without a standard deviation, which would favour very easy and very hard prompts."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.plugins import registry
from services.trainer.algorithms.base import Advantages, Rewards
from services.trainer.estimation.rewards import OptionsWithoutKl, by_group


@registry("estimator").register("dr_grpo")
class DrGrpo:
    """A_i = R_i - mean_group(R), in float64.

    Source: Dr. GRPO, arXiv:2503.20783, section 3.2. Its other half, a constant in place of the length of a sequence,
    is `trainer.aggregation = "constant"`. Groups of one and of equal rewards get exact zeros.
    """

    class Options(OptionsWithoutKl):
        """The estimator has none."""

    def __init__(self, options: Options) -> None:
        pass

    def advantages(self, groups: Sequence[Rewards]) -> Advantages:
        """See Estimator.advantages."""
        return by_group(groups, lambda rewards: rewards - rewards.mean())
