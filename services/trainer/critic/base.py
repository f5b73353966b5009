"""What the training step asks of a critic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from services.trainer.critic.residency import Resident
from services.trainer.datum import Group


class ValueTrainer(Resident, Protocol):
    """Values of tokens, and their training."""

    def values(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """float32 [num_tokens] a datum: at token t the value of the state in which it was chosen, that is, of the
        tokens before it; 0 where weights are 0."""
        ...

    def train(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """Train towards the datums' returns, and say how it went, by names of paceline.telemetry.names."""
        ...
