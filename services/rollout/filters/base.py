"""What a group filter is: it keeps a finished group, or says why not."""

from __future__ import annotations

from typing import Protocol

from paceline.samples import SampleGroup


class Filter(Protocol):
    """A filter plug-in is a class with a nested `Options` model, made as `Class(options)`.

    Filters run in the order of the run file on graded groups. What one refuses is dropped, counted under its reason and
    replaced by the next prompt. A filter decides by the group alone, so that a replay decides alike.
    """

    def keep(self, group: SampleGroup) -> str | None:
        """None keeps the group; a reason (one short word, as "zero_std") drops it."""
        ...
