"""Truncated importance sampling."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.corrections.base import log_gap
from services.trainer.losses.base import clamped_exp

if TYPE_CHECKING:
    from torch import Tensor

    from services.trainer.token_batch import TokenBatch


@registry("correction").register("tis")
class Tis:
    """w = min(exp(behaviour - sampler), clip) on each token.

    Behaviour is the policy before the step's first update. Source: Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training", 2025 (truncated importance sampling); Ionides 2008 for the truncation.
    """

    class Options(StrictModel):
        """Options of the correction."""

        clip: float = Field(default=2.0, gt=0)
        """Largest weight."""

    def __init__(self, options: Options) -> None:
        self._clip = options.clip

    def __call__(self, batch: TokenBatch) -> Tensor:
        """See Correction."""
        return clamped_exp(log_gap(batch)).clamp(max=self._clip)
