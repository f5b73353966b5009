"""The policy gradient with a clipped importance weight, which leaves every token its gradient."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import registry
from services.trainer.losses._bounds import RatioBounds
from services.trainer.losses.base import LossSums, TokenBatch, ratio_of, unmasked


@registry("loss").register("cispo")
class Cispo:
    """L = -stop(clip(r, 1 - clip_low, 1 + clip_high)) A log p with r = exp(policy - behaviour).

    Source: CISPO, MiniMax-M1, arXiv:2506.13585, eq. 4 and 5, which sets no lower bound in practice; so does the default
    here, [0, 4]. Metric sums: clip_fraction, the tokens whose ratio is out of bounds.
    """

    class Options(RatioBounds):
        """Options of the loss."""

        clip_low: float = Field(default=1.0, gt=0, le=1)
        clip_high: float = Field(default=3.0, gt=0)

    def __init__(self, options: Options) -> None:
        self._low, self._high = options.bounds

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        ratio = ratio_of(batch).detach()
        policy, advantages = unmasked(batch.policy_logprobs, batch.mask), unmasked(batch.advantages, batch.mask)
        loss = -ratio.clamp(self._low, self._high) * advantages * policy
        outside = ((ratio < self._low) | (ratio > self._high)) & batch.mask
        return LossSums((loss * batch.weights).sum(), {"clip_fraction": outside.sum()})
