"""Why no new prompts are issued at the moment: an evaluation that runs, or a pause that somebody asked for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.bell import Bell


class Hold:
    """Reasons for which no new prompts are issued."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._reasons: Counter[str] = Counter()
        self._paused = ""

    @property
    def cause(self) -> str:
        """Who must end the hold; empty when there is none."""
        if self._paused:
            return f"ResumeProduction: {self._paused}"
        return next(iter(+self._reasons), "")

    @contextmanager
    def during(self, cause: str) -> Iterator[None]:
        """Hold around a block."""
        self._reasons[cause] += 1
        try:
            yield
        finally:
            self._reasons[cause] -= 1
            self._bell.ring()

    def pause(self, reason: str) -> None:
        """Hold until `resume`."""
        self._paused = f"paused ({reason})" if reason else "paused"
        self._bell.ring()

    def resume(self) -> None:
        """End the pause; other holds stay."""
        self._paused = ""
        self._bell.ring()
