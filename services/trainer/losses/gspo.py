"""The clipped surrogate with one ratio a sequence."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.plugins import registry
from services.trainer.losses._bounds import RatioBounds
from services.trainer.losses.base import LossSums, TokenBatch, clamped_exp, unmasked


@registry("loss").register("gspo")
class Gspo:
    """L = -min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) on each token, s = exp(mean of policy - behaviour).

    The mean is over the sequence's unmasked tokens and is clamped to +-20 before exp. With `form = "token"`
    s_t = stop(s) exp(policy_t - stop(policy_t)): the same value, and the same gradient where A and the weight are
    constant on the sequence. Source: GSPO, arXiv:2507.18071, eq. 5 and 7, its section 4.3 for the token form, 5.1 for
    the bounds. The paper's objective is a mean over sequences: aggregation seq_mean_token_mean. Metric sums:
    clip_fraction, the tokens of clipped sequences.
    """

    class Options(RatioBounds):
        """Options of the loss."""

        clip_low: float = Field(default=3e-4, gt=0, le=1)
        clip_high: float = Field(default=4e-4, gt=0)
        form: Literal["sequence", "token"] = "sequence"
        """"token" lets advantages differ within a sequence."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        advantages = unmasked(batch.advantages, batch.mask)
        ratio = batch.spread(clamped_exp(batch.sequence_means(batch.policy_logprobs - batch.behaviour_logprobs)))
        if self._options.form == "token":
            policy = unmasked(batch.policy_logprobs, batch.mask)
            ratio = ratio.detach() * (policy - policy.detach()).exp()
        plain = -ratio * advantages
        clipped = -ratio.clamp(*self._options.bounds) * advantages
        active = (clipped > plain) & batch.mask
        return LossSums((plain.maximum(clipped) * batch.weights).sum(), {"clip_fraction": active.sum()})
