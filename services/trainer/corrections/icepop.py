"""Importance weights that drop what is too far off."""

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


@registry("correction").register("icepop")
class IcePop:
    """w = exp(behaviour - sampler) on each token where lower <= w <= upper, else 0.

    Source: IcePop, in Ring-1T, "Every Step Evolves", arXiv:2510.18855, section 3.3, with its bounds.
    """

    class Options(StrictModel):
        """Options of the correction."""

        lower: float = Field(default=0.5, ge=0)
        upper: float = Field(default=5.0, gt=0)

    def __init__(self, options: Options) -> None:
        self._lower, self._upper = options.lower, options.upper

    def __call__(self, batch: TokenBatch) -> Tensor:
        """See Correction."""
        weights = clamped_exp(log_gap(batch))
        return weights.masked_fill((weights < self._lower) | (weights > self._upper), 0.0)
