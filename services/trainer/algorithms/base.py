"""What an advantage estimator is: rewards of trajectories in, advantages out, of trajectories or of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Rewards = Sequence[float | None]
"""Rewards of one group's trajectories in order; None where there is none."""


@dataclass
class Advantages:
    """Advantages of a step's groups."""

    values: list[np.ndarray]
    """One float64 [num_trajectories] for each group; NaN where the trajectory is excluded (it has no reward)."""
    missing: int = 0
    """Trajectories without a reward."""
    zero_variance: list[bool] = field(default_factory=list)
    """For each group: its rewards do not differ, or fewer than two exist."""


@dataclass
class TrajectoryTokens:
    """One trajectory as a token estimator sees it: its trained tokens only, in order, over all of its samples."""

    reward: float | None
    num_tokens: int
    policy_logprobs: np.ndarray | None = None
    """float64 [num_tokens], before the step's first update; there when `needs` names it, and so are the next two"""
    reference_logprobs: np.ndarray | None = None
    """float64 [num_tokens]"""
    values: np.ndarray | None = None
    """float64 [num_tokens]: the critic's value of the state in which the token was chosen"""


@dataclass
class TokenAdvantages:
    """Advantages of the trained tokens of a step."""

    values: list[list[np.ndarray]]
    """One float64 [num_tokens] for each trajectory of each group; NaN where the trajectory is excluded."""
    returns: list[list[np.ndarray]] | None = None
    """What the critic is trained towards, laid out as the values; an estimator that needs values gives them."""
    missing: int = 0
    zero_variance: list[bool] = field(default_factory=list)


class Estimator(Protocol):
    """Turns the rewards of a step into advantages of trajectories. Pure: no clock, no random numbers, no I/O."""

    Options: type[Any]

    def __init__(self, options: Any) -> None: ...

    def advantages(self, groups: Sequence[Rewards]) -> Advantages:
        """Advantages of all groups of a step. A missing reward excludes its trajectory; it is never read as zero."""
        ...


class TokenEstimator(Protocol):
    """Turns rewards, and what `needs` names, into advantages of tokens. Pure, as an Estimator is."""

    Options: type[Any]
    needs: frozenset[str]
    """Of "policy_logprobs", "reference_logprobs" and "values"."""

    def __init__(self, options: Any) -> None: ...

    def token_advantages(self, groups: Sequence[Sequence[TrajectoryTokens]]) -> TokenAdvantages:
        """Advantages of all trained tokens of a step. A missing reward excludes its trajectory."""
        ...
