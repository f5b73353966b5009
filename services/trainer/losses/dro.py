"""The policy gradient with a quadratic pull to the behaviour policy in place of a ratio."""

from __future__ import annotations

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.losses.base import LossSums, TokenBatch, unmasked


@registry("loss").register("dro")
class Dro:
    """L = -(A log p - beta / 2 (policy - behaviour)^2).

    Source: Direct Reward Optimisation, arXiv:2405.19107, eq. 3, as Tinker's loss `dro` has it on each token. The pull
    is there whatever the advantage is.
    """

    needs_advantages = False

    class Options(StrictModel):
        """Options of the loss."""

        beta: float = Field(default=0.05, ge=0)
        """Strength of the pull."""

    def __init__(self, options: Options) -> None:
        self._beta = options.beta

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        policy, advantages = unmasked(batch.policy_logprobs, batch.mask), unmasked(batch.advantages, batch.mask)
        distance = unmasked(batch.policy_logprobs - batch.behaviour_logprobs, batch.mask)
        loss = self._beta / 2 * distance.square() - advantages * policy
        return LossSums((loss * batch.weights).sum())
