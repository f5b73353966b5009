"""Group-relative advantages: a trajectory is as good as it is better than its siblings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from paceline.plugins import registry
from services.trainer.algorithms.base import Advantages, Rewards
from services.trainer.estimation.rewards import OptionsWithoutKl, by_group


@registry("estimator").register("grpo")
class Grpo:
    """A_i = (R_i - mean_group(R)) / (std + epsilon), in float64.

    Source: DeepSeekMath, arXiv:2402.03300, section 4.1.2 (std over the group). `normalize_std = false` is the form of
    Dr. GRPO, arXiv:2503.20783, section 3.2. Standard deviations are unbiased (n - 1). Groups of one, and groups whose
    rewards are all equal, get exact zeros.
    """

    class Options(OptionsWithoutKl):
        """Options of the estimator."""

        normalize_std: bool = True
        """Divide by a standard deviation of the rewards."""
        std_scope: Literal["group", "batch"] = "group"
        """Whose: that of the group's rewards, or that of R - group mean over the whole step, which keeps the weight of
        an almost unanimous group small."""
        epsilon: float = Field(default=1e-6, gt=0)
        """Added to the standard deviation."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def advantages(self, groups: Sequence[Rewards]) -> Advantages:
        """See Estimator.advantages."""
        result = by_group(groups, self._relative)
        if self._options.normalize_std and self._options.std_scope == "batch":
            self._divide_by_batch(result.values)
        return result

    def _relative(self, rewards: np.ndarray) -> np.ndarray:
        centred = rewards - rewards.mean()
        if self._options.normalize_std and self._options.std_scope == "group":
            return centred / (rewards.std(ddof=1) + self._options.epsilon)
        return centred

    def _divide_by_batch(self, values: list[np.ndarray]) -> None:
        known = np.concatenate([item[~np.isnan(item)] for item in values]) if values else np.empty(0)
        if known.size < 2:
            return
        scale = known.std(ddof=1) + self._options.epsilon
        for item in values:
            item /= scale
