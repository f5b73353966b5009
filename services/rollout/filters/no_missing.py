"""Drops groups in which a reward is missing."""

from __future__ import annotations

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from paceline.samples import SampleGroup


@registry("filter").register("no_missing")
class NoMissing:
    """Reason `missing_reward`."""

    class Options(StrictModel):
        """Options of the no_missing filter."""

        max_missing: int = Field(default=0, ge=0)
        """How many missing rewards are tolerated in a group."""

    def __init__(self, options: Options) -> None:
        self._max_missing = options.max_missing

    def keep(self, group: SampleGroup) -> str | None:
        missing = sum(sample.reward_value is None for sample in group.samples)
        return None if missing <= self._max_missing else "missing_reward"
