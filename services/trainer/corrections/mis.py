"""Importance weights by token or by sequence, bounded in one of three ways."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.corrections.base import Level, log_gap
from services.trainer.losses.base import clamped_exp

if TYPE_CHECKING:
    from torch import Tensor

    from services.trainer.token_batch import TokenBatch


@registry("correction").register("mis")
class Mis:
    """w = exp(behaviour - sampler) at the level: of the token, the product over its sequence, or the geometric mean.

    Mode "truncate": min(w, upper). "clip": w moved into [lower, upper]. "mask": w inside, 0 outside. The logarithm is
    clamped to +-20. Source: J. Liu, Y. Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the
    Training-Inference Mismatch", 2025 (token and sequence TIS and MIS); geometric mean: GSPO, arXiv:2507.18071, eq. 5.
    Weights are not normalized to a mean of 1: that would make a gradient depend on the cut into micro-batches.
    """

    class Options(StrictModel):
        """Options of the correction."""

        level: Level = "token"
        mode: Literal["truncate", "clip", "mask"] = "truncate"
        upper: float = Field(default=2.0, gt=0)
        lower: float | None = Field(default=None, ge=0)
        """Unset means 1 / upper. Not used by "truncate"."""

    def __init__(self, options: Options) -> None:
        self._level: Level = options.level
        self._mode = options.mode
        self._upper = options.upper
        self._lower = 1 / options.upper if options.lower is None else options.lower

    def __call__(self, batch: TokenBatch) -> Tensor:
        """See Correction."""
        weights = clamped_exp(log_gap(batch, self._level))
        if self._mode == "truncate":
            return weights.clamp(max=self._upper)
        if self._mode == "clip":
            return weights.clamp(self._lower, self._upper)
        return weights.masked_fill((weights < self._lower) | (weights > self._upper), 0.0)
