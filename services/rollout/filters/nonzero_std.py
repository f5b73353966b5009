"""Drops groups whose rewards are all alike: relative to the group there is nothing to learn from them."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from paceline.samples import SampleGroup


@registry("filter").register("nonzero_std")
class NonzeroStd:
    """Reason `zero_std`. Missing rewards do not count; fewer than two rewards have no deviation."""

    class Options(StrictModel):
        """Options of the nonzero_std filter."""

        min_std: float = Field(default=1e-6, ge=0)
        """Smallest standard deviation (population) that is kept."""

    def __init__(self, options: Options) -> None:
        self._min_std = options.min_std

    def keep(self, group: SampleGroup) -> str | None:
        values = [value for sample in group.samples if (value := sample.reward_value) is not None]
        return None if len(values) > 1 and float(np.std(values)) >= self._min_std else "zero_std"
