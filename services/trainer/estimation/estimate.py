"""Runs an estimator over a step, of whichever of the two kinds it is, and gives the datums what it found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from paceline.config import ConfigError
from paceline.config.trainer import TrainerConfig
from services.trainer.algorithms.base import Advantages, Estimator, TokenAdvantages, TokenEstimator, TrajectoryTokens
from services.trainer.step.data import StepGroup

Scores = Mapping[str, Sequence[Sequence[np.ndarray]]]
"""By name of TokenEstimator.needs: an array [num_tokens] for each datum of each group."""

KNOWN_NEEDS = frozenset({"policy_logprobs", "reference_logprobs", "values"})


def needs_of(estimator: Estimator | TokenEstimator) -> frozenset[str]:
    """What has to be computed before the estimator can run."""
    return frozenset(getattr(estimator, "needs", ()))


def check_estimator(estimator: Estimator | TokenEstimator, config: TrainerConfig) -> None:
    """ConfigError when the estimator needs what the configuration does not give, or a critic would train for nobody."""
    needs, name = needs_of(estimator), config.estimator.name
    unknown = sorted(needs - KNOWN_NEEDS)
    if unknown:
        raise ConfigError(f"trainer.estimator.name = {name!r} needs {unknown[0]!r}; known are {sorted(KNOWN_NEEDS)}")
    if "values" in needs and config.critic is None:
        raise ConfigError(f"trainer.estimator.name = {name!r} needs a critic; add a table [trainer.critic]")
    if config.critic is not None and "values" not in needs:
        raise ConfigError(f"trainer.critic: trainer.estimator.name = {name!r} uses no values; leave the table out")


def estimate(estimator: Estimator | TokenEstimator, groups: Sequence[StepGroup], scores: Scores) -> list[bool]:
    """Set advantages (and returns) of the groups' datums; for each group, whether its rewards do not differ."""
    if hasattr(estimator, "token_advantages"):
        found = estimator.token_advantages(_tokens(groups, scores))  # type: ignore[union-attr]
        _give_tokens(groups, found)
        return found.zero_variance
    rewards = [[item.reward if item.usable else None for item in group.trajectories] for group in groups]
    plain: Advantages = estimator.advantages(rewards)  # type: ignore[union-attr]
    for group, values in zip(groups, plain.values, strict=True):
        pairs = zip(values, group.usable_tokens(), strict=True)
        group.give("advantages", [np.full(count, value) for value, count in pairs])
    return plain.zero_variance


def give_rewards(groups: Sequence[StepGroup]) -> None:
    """For a loss that needs no advantages: the reward, where there is one, stands in their place."""
    for group in groups:
        pairs = zip(group.trajectories, group.usable_tokens(), strict=True)
        group.give("advantages", [np.full(count, item.reward or 0.0) for item, count in pairs])


def _tokens(groups: Sequence[StepGroup], scores: Scores) -> list[list[TrajectoryTokens]]:
    found = []
    for number, group in enumerate(groups):
        known = {name: group.collect(arrays[number]) for name, arrays in scores.items()}
        found.append([
            TrajectoryTokens(
                item.reward if item.usable else None, count, **{name: parts[index] for name, parts in known.items()}
            )
            for index, (item, count) in enumerate(zip(group.trajectories, group.usable_tokens(), strict=True))
        ])  # fmt: skip
    return found


def _give_tokens(groups: Sequence[StepGroup], found: TokenAdvantages) -> None:
    for number, group in enumerate(groups):
        group.give("advantages", found.values[number])
        if found.returns is not None:
            group.give("returns", found.returns[number])
