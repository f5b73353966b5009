"""What a loss is: per-token tensors in, a sum and sums of metrics out. Whoever calls it divides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import Tensor

RATIO_CLAMP = 20.0
"""Log-ratios are clamped to +-20 before exp, which keeps the ratio finite in float32."""


@dataclass
class TokenBatch:
    """Tokens of one micro-batch, flat. All tensors have shape [num_tokens] and one floating dtype."""

    policy_logprobs: Tensor
    """Carries the gradient."""
    weights: Tensor
    """Factor of each token in the sum; 0 masks the token, whatever its other values are (NaN included)."""
    advantages: Tensor
    sampler_logprobs: Tensor
    behaviour_logprobs: Tensor
    """Denominator of the ratio."""
    reference_logprobs: Tensor | None = None

    @property
    def mask(self) -> Tensor:
        """bool [num_tokens], True where the token counts."""
        return self.weights != 0


@dataclass
class LossSums:
    """A loss before any division."""

    total: Tensor
    """Scalar with a gradient: the sum of weight times token loss."""
    metrics: dict[str, Tensor] = field(default_factory=dict)
    """Scalars without a gradient: sums over tokens, for a division by the number of tokens."""


class Loss(Protocol):
    """A token loss. It must give masked tokens neither value nor gradient."""

    Options: type[Any]

    def __init__(self, options: Any) -> None: ...

    def __call__(self, batch: TokenBatch) -> LossSums: ...


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with masked entries set to 0, so that nothing computed from them can poison a sum or a gradient."""
    return values.masked_fill(~mask, 0.0)


def ratio_of(batch: TokenBatch) -> Tensor:
    """exp(policy - behaviour), clamped; 1 where masked. Shape [num_tokens]."""
    difference = unmasked(batch.policy_logprobs - batch.behaviour_logprobs, batch.mask)
    return difference.clamp(-RATIO_CLAMP, RATIO_CLAMP).exp()
