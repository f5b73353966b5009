"""Rewards of groups as arrays: what is missing, what is refused, what carries no signal. For all estimators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from pydantic import model_validator

from paceline.config import StrictModel
from services.trainer.algorithms.base import Advantages, Rewards


class InvalidReward(ValueError):
    """A reward that an estimator cannot use; the text names group, trajectory and value."""


class OptionsWithoutKl(StrictModel):
    """Options of an estimator whose formula has no KL in the reward."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_kl(cls, data: Any) -> Any:
        named = [key for key in data if str(key).startswith("kl_")] if isinstance(data, dict) else []
        if named:
            raise ValueError(
                f"{named[0]}: a KL in the reward is refused here: it would be in baselines, in normalization and in "
                "the critic's targets, and has no gradient of its own; put it into the loss with "
                "trainer.kl_coefficient, or use reinforce_plus_plus, whose formula has it"
            )
        return data


def reward_array(rewards: Rewards, group: int = 0) -> np.ndarray:
    """float64 [num_trajectories], NaN where the reward is missing. InvalidReward for one that is not finite."""
    for number, value in enumerate(rewards):
        if value is not None and not np.isfinite(value):
            raise InvalidReward(
                f"INVALID_REWARD: group {group} of the step, trajectory {number}: the reward is {value}; "
                "grade it as missing instead"
            )
    return np.array([np.nan if value is None else value for value in rewards], dtype=np.float64)


def is_flat(known: np.ndarray) -> bool:
    """Whether rewards [n] tell nothing apart: there are fewer than two, or all are equal."""
    return known.size < 2 or bool(known.max() == known.min())


def by_group(groups: Sequence[Rewards], relative: Callable[[np.ndarray], np.ndarray]) -> Advantages:
    """Advantages within each group: `relative` maps n >= 2 rewards that are not all equal to n advantages.

    Groups of one and groups of equal rewards get exact zeros, which a mean in floating point would not give.
    """
    result = Advantages(values=[])
    for number, rewards in enumerate(groups):
        values = reward_array(rewards, number)
        present = ~np.isnan(values)
        known = values[present]
        flat = is_flat(known)
        values[present] = 0.0 if flat else relative(known)
        result.values.append(values)
        result.missing += int((~present).sum())
        result.zero_variance.append(flat)
    return result
