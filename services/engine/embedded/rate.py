"""Tokens per second over the last few seconds, cheap enough to count at every step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable


class Rate:
    """Counts over a sliding window. One thread adds; any thread reads."""

    def __init__(self, window_seconds: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = window_seconds
        self._clock = clock
        self._counts: deque[tuple[float, int]] = deque(maxlen=4096)

    def add(self, count: int) -> None:
        self._counts.append((self._clock(), count))

    def per_second(self) -> float:
        """Mean rate over the part of the window in which there was work; 0 when nothing came in it."""
        now = self._clock()
        recent = [item for item in list(self._counts) if now - item[0] <= self._window]
        if not recent:
            return 0.0
        return sum(count for _, count in recent) / max(now - recent[0][0], 0.1)
