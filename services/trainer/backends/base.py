"""What a train backend is: four primitives on one policy slot. Training loop and gRPC service are its clients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from services.trainer.datum import Group
from services.trainer.losses.base import LossSums, TokenBatch

LossFunction = Callable[[TokenBatch], LossSums]


@dataclass
class PassResult:
    """Outcome of one forward_backward over all its micro-batches."""

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


class TrainBackend(Protocol):
    """One policy slot: full parameters, or a LoRA adapter. Synchronous; calls come from one thread."""

    kind: str  # "full" or "adapter"
    vocabulary: int

    @property
    def updates(self) -> int: ...

    def forward(self, groups: Sequence[Group], reference: bool = False) -> list[list[np.ndarray]]:
        """Log-probabilities of every token, float32 [num_tokens] a datum, the first 0; of the reference when asked."""
        ...

    def forward_backward(
        self, groups: Sequence[Group], loss: LossFunction, reference: bool = False, every_token: bool = False
    ) -> PassResult:
        """Add the gradient of the summed loss to the pending one. `reference`: the loss gets reference_logprobs."""
        ...

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """Divide the pending gradient by the denominator, clip, update, clear."""
        ...

    def state(self) -> dict[str, bytes]:
        """Everything that resumes training bit for bit, as files by name (safetensors and JSON)."""
        ...

    def load_state(self, files: Callable[[str], Path]) -> None:
        """Take over what `state` wrote; DataLoss names what does not fit. Clears the pending gradient."""
        ...

    def weights(self) -> dict[str, Any]:
        """Tensors to publish by name: the adapter in float32, or all parameters in the compute dtype."""
        ...

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's adapter_config.json, or None for full parameters."""
        ...

    def export(self, directory: Path) -> None:
        """Write a merged Hugging Face model with its tokenizer into an empty directory."""
        ...
