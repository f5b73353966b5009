"""What the passes and updates of a train backend return."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from services.trainer.ranks.world import World

_LOSS = "sum of losses"


@dataclass
class PassResult:
    """Outcome of one forward_backward over all its micro-batches, on all ranks."""

    loss_sum: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)  # sums of the loss's metrics, and entropy_sum in nat
    policy_logprobs: list[list[np.ndarray]] = field(default_factory=list)
    """float32 [num_tokens] for each datum of each group, 0 where none was asked for."""
    num_tokens: int = 0  # that had a weight


def add_over_ranks(result: PassResult, logprobs: Sequence[np.ndarray], world: World) -> None:
    """Make the result of this rank's share that of all; `logprobs` are the arrays that it holds."""
    result.metrics = world.merge_metrics({**result.metrics, _LOSS: result.loss_sum})
    result.loss_sum = result.metrics.pop(_LOSS)
    world.sum_arrays(logprobs)


@dataclass(frozen=True)
class StepOutcome:
    """Outcome of one optim_step."""

    stepped: bool
    """False when there was no pending gradient, or it was not finite."""
    grad_norm: float
    """Global L2 norm before clipping; not finite when the step was refused for that."""
