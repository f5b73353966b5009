"""The clipped surrogate of PPO, the default policy loss."""

from __future__ import annotations

from pydantic import Field

from paceline.plugins import registry
from services.trainer.losses._bounds import RatioBounds
from services.trainer.losses.base import LossSums, TokenBatch, ratio_of, unmasked


@registry("loss").register("ppo")
class Ppo:
    """L = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(policy - behaviour).

    Source: PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476, eq. 10; dual clip, which bounds the
    loss of a negative advantage by -c A: arXiv:1912.09729, eq. 5. Metric sums: clip_fraction, the tokens whose clipped
    branch is the active one.
    """

    class Options(RatioBounds):
        """Options of the loss."""

        dual_clip: float | None = Field(default=None, gt=1)
        """c of the dual clip; unset means off."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        advantages = unmasked(batch.advantages, batch.mask)
        ratio = ratio_of(batch)
        plain = -ratio * advantages
        clipped = -ratio.clamp(*self._options.bounds) * advantages
        loss = plain.maximum(clipped)
        if self._options.dual_clip is not None:
            bound = -self._options.dual_clip * advantages
            loss = loss.where(advantages >= 0, loss.minimum(bound))
        active = (clipped > plain) & batch.mask
        return LossSums((loss * batch.weights).sum(), {"clip_fraction": active.sum()})
