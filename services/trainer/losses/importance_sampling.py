"""The policy gradient on samples of another policy."""

from __future__ import annotations

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.losses.base import LossSums, TokenBatch, ratio_of, unmasked


@registry("loss").register("importance_sampling")
class ImportanceSampling:
    """L = -r A with r = exp(policy - behaviour): `policy_gradient` with its ratio, under the name Tinker gives it.

    Source: importance sampling of REINFORCE, as in PPO, arXiv:1707.06347, eq. 6.
    """

    class Options(StrictModel):
        """The loss has no options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss."""
        loss = -ratio_of(batch) * unmasked(batch.advantages, batch.mask)
        return LossSums((loss * batch.weights).sum())
