"""The latest changes of a run, kept to be written again when the store comes back older than it was.

Redis with `appendfsync everysec` may lose what it acknowledged in the last two seconds when it is killed: it postpones
its writes while a flush to the disk goes on.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

RECENT_SECONDS = 10.0


class RecentChanges:
    """What was written to one run lately, to write it again when the store turns out to have lost it."""

    def __init__(self) -> None:
        self.revision = 0
        self._items: deque[tuple[int, float, list[tuple[Any, ...]]]] = deque()

    def add(self, revision: int, writes: list[tuple[Any, ...]]) -> None:
        """The store is at `revision` now, by these writes."""
        now = time.monotonic()
        self.revision = revision
        self._items.append((revision, now, writes))
        while self._items[0][1] < now - RECENT_SECONDS:
            self._items.popleft()

    def after(self, revision: int) -> list[tuple[Any, ...]] | None:
        """All writes since `revision`, None when the oldest of them are no longer kept."""
        items = [item for item in self._items if item[0] > revision]
        if len(items) != self.revision - revision:
            return None
        return [command for _, _, writes in items for command in writes]

    def forget(self, revision: int) -> None:
        """Go on from what the store has."""
        self.revision = revision
        self._items.clear()
