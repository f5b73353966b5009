"""Leaves out tokens or sequences on which trainer and engine disagree too much."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.corrections.base import Level, log_gap
from services.trainer.losses.base import clamped_exp

if TYPE_CHECKING:
    from torch import Tensor

    from services.trainer.token_batch import TokenBatch


@registry("correction").register("rejection")
class Rejection:
    """1 where lower <= exp(behaviour - sampler) <= upper at the level, else 0; 0 on a sequence with a vetoed token.

    A token with exp(behaviour - sampler) < veto vetoes its whole sequence. The weight of what stays is 1: combine with
    "tis" or "mis" for an importance weight. Source: J. Liu, Y. Li et al., "When Speed Kills Stability: Demystifying RL
    Collapse from the Training-Inference Mismatch", 2025.
    """

    class Options(StrictModel):
        """Options of the correction."""

        level: Level = "geometric"
        upper: float = Field(default=1.001, gt=0)
        lower: float | None = Field(default=None, ge=0)
        """Unset means 1 / upper."""
        veto: float | None = Field(default=1e-4, gt=0)
        """Smallest ratio that a single token may have; unset means that there is no veto."""

    def __init__(self, options: Options) -> None:
        self._level: Level = options.level
        self._upper = options.upper
        self._lower = 1 / options.upper if options.lower is None else options.lower
        self._veto = options.veto

    def __call__(self, batch: TokenBatch) -> Tensor:
        """See Correction."""
        ratio = clamped_exp(log_gap(batch, self._level))
        keep = (ratio >= self._lower) & (ratio <= self._upper)
        if self._veto is not None:
            vetoed = (log_gap(batch) < math.log(self._veto)).to(ratio.dtype)
            keep = keep & (batch.spread(batch.sequence_sums(vetoed)) == 0)
        return keep.to(ratio.dtype)
