"""What an advantage estimator is: rewards of trajectories in, advantages of trajectories out, nothing else."""

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
    """For each group: its rewards do not differ (or fewer than two exist), so it carries no signal."""


class Estimator(Protocol):
    """Turns the rewards of a step into advantages. Pure: no clock, no random numbers, no I/O."""

    Options: type[Any]

    def __init__(self, options: Any) -> None: ...

    def advantages(self, groups: Sequence[Rewards]) -> Advantages:
        """Advantages of all groups of a step. A missing reward excludes its trajectory; it is never read as zero."""
        ...
