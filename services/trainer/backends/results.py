"""What the passes and updates of a train backend return."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class PassResult:
    """Outcome of one forward_backward over all its micro-batches, on all ranks."""

    loss_sum: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # sums of the loss's metrics, and entropy_sum in nat
    policy_logprobs: list[list[np.ndarray]] = field(default_factory=list)
    """float32 [num_tokens] for each datum of each group, 0 where none was asked for."""
    num_tokens: int = 0  # that had a weight


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one optim_step."""

    stepped: bool
    """False when there was no pending gradient, or it was not finite."""
    grad_norm: float
    """Global L2 norm before clipping; not finite when the step was refused for that."""
