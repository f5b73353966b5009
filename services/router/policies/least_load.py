"""The engine with the fewest samples in flight; among equals the one that has waited longest for a request."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.config import StrictModel
from paceline.plugins import registry
from services.router.policies.base import C, Placing


@registry("policy").register("least_load")
class LeastLoad:
    """Even load, counted in samples, whatever the order in which requests end."""

    class Options(StrictModel):
        """No options."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def choose(self, placing: Placing, candidates: Sequence[C]) -> C:
        return min(candidates, key=lambda item: (item.num_in_flight, item.last_placed, item.key))
