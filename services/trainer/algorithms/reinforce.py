"""The plain policy gradient: a trajectory's advantage is its reward, less a baseline that may be chosen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from paceline.plugins import registry
from services.trainer.algorithms.base import Advantages, Rewards
from services.trainer.estimation.rewards import OptionsWithoutKl, by_group, is_flat, reward_array


@registry("estimator").register("reinforce")
class Reinforce:
    """A_i = R_i - b, in float64.

    Source: R. J. Williams 1992, "Simple Statistical Gradient-Following Algorithms for Connectionist Reinforcement
    Learning". Without a baseline a group of one, or of equal rewards, has a gradient like any other. With one, rewards
    that are all equal (in the group, in the step) give exact zeros.
    """

    class Options(OptionsWithoutKl):
        """Options of the estimator."""

        baseline: Literal["none", "group", "batch"] = "none"
        """b: 0, the mean reward of the group, or the mean over the trajectories of the whole step."""

    def __init__(self, options: Options) -> None:
        self._baseline = options.baseline

    def advantages(self, groups: Sequence[Rewards]) -> Advantages:
        """See Estimator.advantages."""
        if self._baseline == "group":
            return by_group(groups, lambda rewards: rewards - rewards.mean())
        values = [reward_array(rewards, number) for number, rewards in enumerate(groups)]
        known = [item[~np.isnan(item)] for item in values]
        flat = [is_flat(item) for item in known]
        if self._baseline == "batch":
            step = np.concatenate([*known, np.empty(0)])
            baseline = 0.0 if step.size == 0 else float(step[0] if is_flat(step) else step.mean())
            values = [item - baseline for item in values]
        return Advantages(values, sum(int(np.isnan(item).sum()) for item in values), flat)
