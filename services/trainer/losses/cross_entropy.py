"""Supervised learning on given tokens."""

from __future__ import annotations

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.losses.base import LossSums, TokenBatch, unmasked


@registry("loss").register("cross_entropy")
class CrossEntropy:
    """L = -log p of each token, times its weight. Advantages and sampler log-probabilities play no part."""

    class Options(StrictModel):
        """The loss has no options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        return LossSums(-(unmasked(batch.policy_logprobs, batch.mask) * batch.weights).sum())
