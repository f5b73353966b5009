"""What a correction is: a weight for every token of the policy loss, without a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from services.trainer.token_batch import TokenBatch


class Correction(Protocol):
    """Weights [num_tokens] of a micro-batch, 0 where a token is rejected.

    They multiply numerators only: what the sum is divided by was counted before, rejected tokens included. Values of
    masked tokens (weight 0 in the batch) may be NaN and must not reach other tokens.
    """

    Options: type[Any]

    def __init__(self, options: Any) -> None: ...

    def __call__(self, batch: TokenBatch) -> Tensor: ...


def log_gap(batch: TokenBatch) -> Tensor:
    """behaviour - sampler on each token, 0 where masked, without a gradient: the trainer's policy against the engine's.

    Behaviour must be the policy before the step's first update (`trainer.behaviour = "policy"`).
    """
    difference = (batch.behaviour_logprobs - batch.sampler_logprobs).detach()
    return difference.masked_fill(~batch.mask, 0.0)
