"""What a train backend is: four primitives on one policy slot. Training loop and gRPC service are its clients.

Several ranks are one backend: each constructs it with the same arguments and gets the same calls with the same
arguments, all groups included, works on its share, and returns the same result. Collectives may hide in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from services.trainer.backends.results import PassResult as PassResult
from services.trainer.backends.results import StepOutcome as StepOutcome
from services.trainer.datum import Group
from services.trainer.losses.base import LossSums, TokenBatch

if TYPE_CHECKING:
    from paceline.config.trainer import TrainerConfig
    from services.trainer.objective import Objective
    from services.trainer.ranks.world import World

LossFunction = Callable[[TokenBatch], LossSums]


class TrainBackend(Protocol):
    """One policy slot: full parameters, or a LoRA adapter. Synchronous; calls come from one thread."""

    kind: str  # "full" or "adapter"
    vocabulary: int

    def __init__(self, path: Path, config: TrainerConfig, seed: int, world: World | None = None) -> None: ...

    @property
    def updates(self) -> int: ...

    def forward(self, groups: Sequence[Group], reference: bool = False) -> list[list[np.ndarray]]:
        """Log-probabilities of every token, float32 [num_tokens] a datum, the first 0; of the reference when asked."""
        ...

    def forward_backward(
        self, groups: Sequence[Group], objective: Objective, reference: bool = False, every_token: bool = False
    ) -> PassResult:
        """Add the gradient of the summed loss to the pending one. `reference`: the loss gets reference_logprobs."""
        ...

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """Divide the pending gradient, a sum over all ranks, by the denominator, clip, update, clear."""
        ...

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        """Write what resumes training bit for bit, each rank files of its own; or copy it now, and write later."""
        ...

    def finish_save(self) -> None:
        """Return when the files of the last save_state are written; raise what went wrong."""
        ...

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """Take over what `save_state` wrote, on any number of ranks; FailedPrecondition names what does not fit.

        Without `optimizer` moments start anew, progress does not. Clears the pending gradient.
        """
        ...

    def weights(self) -> dict[str, Any]:
        """Whole tensors by name, on rank 0 (empty elsewhere): the adapter in float32, or all in the compute dtype."""
        ...

    def adapter_config(self) -> dict[str, Any] | None:
        """PEFT's adapter_config.json, or None for full parameters."""
        ...

    def export(self, directory: Path) -> None:
        """Write a merged Hugging Face model with its tokenizer into an empty directory, from rank 0."""
        ...
