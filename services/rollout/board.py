"""What the groups in flight are doing, as one line of the status: counts by stage, causes of waits, the oldest."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from paceline.rpc.status import Activity


@dataclass
class _Entry:
    stage: str = "starting"
    cause: str = ""
    last_cause: str = ""
    began: float = field(default_factory=time.time)


class GroupBoard:
    """Keeps one activity of the status in step with many concurrent groups."""

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @contextmanager
    def group(self, group_id: str) -> Iterator[None]:
        """Around the whole work on a group."""
        self._entries[group_id] = _Entry()
        try:
            yield
        finally:
            del self._entries[group_id]
            self._show()

    def stage(self, group_id: str, stage: str) -> None:
        """The group is now in this stage: "generating"."""
        entry = self._entries[group_id]
        entry.stage, entry.last_cause = stage, ""
        self._show()

    def stage_of(self, group_id: str) -> str:
        """What the group is doing and, if it waits or had to wait, for whom."""
        entry = self._entries[group_id]
        if entry.cause:
            return f"{entry.stage}, waiting for {entry.cause}"
        return f"{entry.stage}, after a wait for {entry.last_cause}" if entry.last_cause else entry.stage

    @contextmanager
    def waiting(self, group_id: str, cause: str) -> Iterator[None]:
        """Around a wait of one group; one inside it shows its own cause meanwhile."""
        entry = self._entries[group_id]
        before = entry.cause
        entry.cause = entry.last_cause = cause
        self._show()
        try:
            yield
        finally:
            entry.cause = before
            self._show()

    def oldest(self) -> str:
        """The group longest in flight, with its stage and age; empty when there is none."""
        if not self._entries:
            return ""
        group_id, entry = min(self._entries.items(), key=lambda item: item[1].began)
        return f"{group_id} ({self.stage_of(group_id)}) for {time.time() - entry.began:.0f} s"

    def _show(self) -> None:
        stages = Counter(entry.stage for entry in self._entries.values() if not entry.cause)
        causes = Counter(entry.cause for entry in self._entries.values() if entry.cause)
        doing = ", ".join(f"{count} {stage}" for stage, count in sorted(stages.items()))
        waiting = "; ".join(f"{cause} ({count} groups)" for cause, count in causes.most_common(3))
        if (doing, waiting) != (self._activity.doing, self._activity.waiting_for):
            self._activity.set(doing or ("idle" if not waiting else ""))
            self._activity.waiting_for = waiting
