"""Supervised learning on given tokens."""

from __future__ import annotations

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.losses.base import LossSums, TokenBatch, unmasked


@registry("loss").register("cross_entropy")
class CrossEntropy:
    """L = -log p of each token, times its weight, which may have either sign: the gradient by log p is -weight.

    Advantages and sampler log-probabilities play no part. Source: maximum likelihood; with weights made by a client it
    is also how Tinker's `forward_backward_custom` passes any other gradient.
    """

    needs_advantages = False
    needs_rewards = False

    class Options(StrictModel):
        """The loss has no options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        return LossSums(-(unmasked(batch.policy_logprobs, batch.mask) * batch.weights).sum())
