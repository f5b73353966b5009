"""What a loss is: per-token tensors in, a sum and sums of metrics out. Whoever calls it divides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from services.trainer.token_batch import TokenBatch, unmasked

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RATIO_CLAMP", "Loss", "LossSums", "TokenBatch", "clamped_exp", "ratio_of", "unmasked"]

RATIO_CLAMP = 20.0
"""Log-ratios are clamped to +-20 before exp, which keeps the ratio finite in float32."""


@dataclass
class LossSums:
    """A loss before any division."""

    total: Tensor
    """Scalar with a gradient: the sum of weight times token loss."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars without a gradient: sums over tokens, to be added up; the largest counts where the name ends in _max."""


class Loss(Protocol):
    """A token, sequence or pair loss. It must give masked tokens neither value nor gradient.

    Optional class attributes: `needs_reference = True` has reference_logprobs computed; `needs_advantages = False` says
    that groups whose advantages are all 0 have a gradient too; `needs_rewards = False`, that advantages are labels of
    the data, or unused, so that none are estimated.
    """

    Options: type[Any]

    def __init__(self, options: Any) -> None: ...

    def __call__(self, batch: TokenBatch) -> LossSums: ...


def clamped_exp(difference: Tensor) -> Tensor:
    """exp of a log-ratio that is clamped to +-RATIO_CLAMP."""
    return difference.clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()


def ratio_of(batch: TokenBatch) -> Tensor:
    """exp(policy - behaviour), clamped; 1 where masked. Shape [num_tokens]."""
    return clamped_exp(unmasked(batch.policy_logprobs - batch.behaviour_logprobs, batch.mask))
