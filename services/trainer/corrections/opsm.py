"""Leaves out failed sequences that the policy has moved away from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry

if TYPE_CHECKING:
    from torch import Tensor

    from services.trainer.token_batch import TokenBatch


@registry("correction").register("opsm")
class Opsm:
    """0 on tokens with A < 0 of a sequence whose mean of (sampler - policy) is above delta, else 1.

    Source: off-policy sequence masking of DeepSeek-V3.2, arXiv:2512.02556, section 3.1, where the sampling policy is
    the engine's, so that its mismatch counts as well as the updates since.
    """

    class Options(StrictModel):
        """Options of the correction."""

        delta: float = Field(default=1e-4, ge=0)
        """Largest mean log-ratio, in nat a token."""

    def __init__(self, options: Options) -> None:
        self._delta = options.delta

    def __call__(self, batch: TokenBatch) -> Tensor:
        """See Correction."""
        moved = batch.sequence_means((batch.sampler_logprobs - batch.policy_logprobs).detach())
        rejected = (batch.spread(moved) > self._delta) & (batch.advantages < 0)
        return (~rejected).to(batch.weights.dtype)
