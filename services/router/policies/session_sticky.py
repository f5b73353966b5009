"""Requests of one session go to the engine that has the session's prefix in its cache; the rest by least load."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from services.router.policies.base import C, Placing
from services.router.policies.least_load import LeastLoad


@registry("policy").register("session_sticky")
class SessionSticky:
    """Remembers where each session ran last. A session whose engine cannot take it moves for good."""

    class Options(StrictModel):
        """Options of session_sticky."""

        max_sessions: int = Field(default=100_000, ge=1)
        """Sessions remembered; the least recently used is forgotten first."""

    def __init__(self, options: Options) -> None:
        self._max_sessions = options.max_sessions
        self._least_load = LeastLoad(LeastLoad.Options())
        self._homes: OrderedDict[str, tuple[str, str, str, int]] = OrderedDict()

    def choose(self, placing: Placing, candidates: Sequence[C]) -> C:
        if not placing.session_id:
            return self._least_load.choose(placing, candidates)
        home = self._homes.get(placing.session_id)
        chosen = next((item for item in candidates if item.key == home), None)
        if chosen is None:
            chosen = self._least_load.choose(placing, candidates)
        self._homes[placing.session_id] = chosen.key
        self._homes.move_to_end(placing.session_id)
        while len(self._homes) > self._max_sessions:
            self._homes.popitem(last=False)
        return chosen
