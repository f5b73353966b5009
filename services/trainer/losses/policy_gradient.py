"""The plain policy gradient, without clipping."""

from __future__ import annotations

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.losses.base import LossSums, TokenBatch, ratio_of, unmasked


@registry("loss").register("policy_gradient")
class PolicyGradient:
    """L = -r A with r = exp(policy - behaviour), or L = -A log p without the importance ratio.

    Source: REINFORCE, Williams 1992, and its off-policy form by importance sampling. On-policy both have one gradient.
    """

    class Options(StrictModel):
        """Options of the loss."""

        importance_ratio: bool = True
        """Weight by the ratio to the behaviour policy; false trusts that samples are on-policy."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        advantages = unmasked(batch.advantages, batch.mask)
        score = ratio_of(batch) if self._options.importance_ratio else unmasked(batch.policy_logprobs, batch.mask)
        return LossSums(-(score * advantages * batch.weights).sum())
