"""REINFORCE++ with a baseline: rewards relative to the group, normalized over the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from paceline.plugins import registry
from services.trainer.algorithms.base import TokenAdvantages, TrajectoryTokens
from services.trainer.estimation.rewards import OptionsWithoutKl, by_group
from services.trainer.estimation.whitening import whiten


@registry("estimator").register("reinforce_plus_plus_baseline")
class ReinforcePlusPlusBaseline:
    """A_t = whiten(R - mean_group(R)), the same on each trained token of a trajectory.

    Source: REINFORCE++, arXiv:2501.03262, the variant with a group baseline. Over tokens the mean need not be 0 when
    trajectories differ in length, and then also groups of equal rewards are moved; over trajectories it is 0, and they
    stay at exact zeros. Steps in which no group has differing rewards give exact zeros in either case. float64.
    """

    needs: frozenset[str] = frozenset()

    class Options(OptionsWithoutKl):
        """Options of the estimator."""

        statistics: Literal["tokens", "trajectories"] = "tokens"
        """What mean and standard deviation are taken over."""

    def __init__(self, options: Options) -> None:
        self._over_tokens = options.statistics == "tokens"

    def token_advantages(self, groups: Sequence[Sequence[TrajectoryTokens]]) -> TokenAdvantages:
        """See TokenEstimator.token_advantages."""
        centred = by_group([[item.reward for item in group] for group in groups], lambda known: known - known.mean())
        if self._over_tokens:
            white = iter(whiten(
                [np.full(item.num_tokens, value) for group, values in zip(groups, centred.values, strict=True)
                 for item, value in zip(group, values, strict=True)]
            ))  # fmt: skip
            found = [[next(white) for _ in group] for group in groups]
        else:
            # Every group sums to 0, so no mean is taken off: rounding would move what is an exact zero.
            scale = _scale(np.concatenate([*centred.values, np.empty(0)]))
            found = [
                [np.full(item.num_tokens, value / scale) for item, value in zip(group, values, strict=True)]
                for group, values in zip(groups, centred.values, strict=True)
            ]
        return TokenAdvantages(found, missing=centred.missing, zero_variance=centred.zero_variance)


def _scale(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(np.sqrt(known.var(ddof=1) + 1e-8)) if known.size > 1 else 1.0
