"""What a correction is: a weight for every token of the policy loss, without a gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from torch import Tensor

    from services.trainer.token_batch import TokenBatch

Level = Literal["token", "sequence", "geometric"]
"""Of which a ratio is: one token; the product over a sequence; its geometric mean, exp of the mean log-ratio."""


class Correction(Protocol):
    """Weights [num_tokens] of a micro-batch, 0 where a token is rejected.

    They multiply numerators only: what the sum is divided by was counted before, rejected tokens included. Values of
    masked tokens (weight 0 in the batch) may be NaN and must not reach other tokens.
    """

    Options: type[Any]

    def __init__(self, options: Any) -> None: ...

    def __call__(self, batch: TokenBatch) -> Tensor: ...


def log_gap(batch: TokenBatch, level: Level = "token") -> Tensor:
    """behaviour - sampler, 0 where masked, without a gradient: the trainer's policy against the engine's. [num_tokens]

    Behaviour must be the policy before the step's first update (`trainer.behaviour = "policy"`). At the levels
    "sequence" and "geometric" each token has the sum or the mean over its sequence's unmasked tokens.
    """
    difference = (batch.behaviour_logprobs - batch.sampler_logprobs).detach()
    if level == "token":
        return difference.masked_fill(~batch.mask, 0.0)
    over = batch.sequence_sums if level == "sequence" else batch.sequence_means
    return batch.spread(over(difference)).masked_fill(~batch.mask, 0.0)
