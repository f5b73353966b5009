"""What the dashboard knows of the run at this moment: written by the followers, read by the page's queries."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from paceline.api.common.v1 import status_service_pb2 as status_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.rpc.membership import RUN_ENDED

GONE_KEPT = 32


@dataclass
class Source:
    """Something that is followed: whether it answers, and if not, why and since when."""

    name: str
    ok: bool = False
    error: str = "not reached yet"
    since: float = field(default_factory=time.time)

    def reached(self) -> None:
        """It answers."""
        if not self.ok:
            self.ok, self.error, self.since = True, "", time.time()

    def failed(self, error: str) -> None:
        """It does not, for this reason; `since` stays at the first failure."""
        if self.ok:
            self.ok, self.since = False, time.time()
        self.error = error


@dataclass
class FollowedMember:
    """One process: what the coordinator says of it, and what it says of itself."""

    member: pb.Member
    source: Source
    status: status_pb.GetStatusResponse | None = None
    load: engine_pb.GetLoadResponse | None = None
    last_version: int = 0
    """The newest weight version that an engine itself reported."""
    gone_since: float | None = None
    """When it left the membership; None while it is in it."""

    busy_share: float | None = None
    """Of the time between the last two looks, the part that an engine decoded; None where it does not say."""
    _busy_seen: tuple[float, float] | None = None

    def look_at_busy(self, now: float) -> None:
        """Take the engine's counter of busy seconds. `now` is monotonic seconds."""
        if self.status is None or "busy_seconds_total" not in self.status.gauges:
            self.busy_share = self._busy_seen = None
            return
        busy = self.status.gauges["busy_seconds_total"]
        if self._busy_seen is not None and now > self._busy_seen[0]:
            share = (busy - self._busy_seen[1]) / (now - self._busy_seen[0])
            self.busy_share = min(1.0, max(0.0, share))
        self._busy_seen = (now, busy)

    @property
    def shown_state(self) -> str:
        """The newer of the two words for its state."""
        return self.status.state if self.status is not None and self.source.ok else self.member.state

    @property
    def left_in_order(self) -> bool:
        """Whether it said that it was leaving before it went."""
        said = (self.member.state, self.status.state if self.status else "")
        return self.gone_since is not None and "DRAINING" in said


@dataclass
class LiveState:
    """Everything that is newer than the store. Plain fields, one event loop."""

    run_id: str
    run: pb.Run | None = None
    newest_version: int = 0
    members: dict[str, FollowedMember] = field(default_factory=dict)
    account: dict[str, Any] | None = None
    steps_source: Source = field(default_factory=lambda: Source("steps from the coordinator"))
    members_source: Source = field(default_factory=lambda: Source("members from the coordinator"))
    ledger_source: Source = field(default_factory=lambda: Source("ledger in Redis"))
    store_source: Source = field(default_factory=lambda: Source("store", ok=True, error=""))
    started: float = field(default_factory=time.time)

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self.run is not None and self.run.state in RUN_ENDED

    def sources(self) -> list[Source]:
        return [self.steps_source, self.members_source, self.ledger_source, self.store_source]

    def set_members(self, members: list[pb.Member]) -> None:
        """Take over a whole membership; those that are missing in it are kept, as gone."""
        now = time.time()
        live = {member.member_id for member in members}
        for member in members:
            known = self.members.get(member.member_id)
            if known is None or known.member.incarnation != member.incarnation:
                self.members[member.member_id] = FollowedMember(member, Source(member.member_id))
            else:
                known.member.CopyFrom(member)
                known.gone_since = None
        for member_id, followed in self.members.items():
            if member_id not in live and followed.gone_since is None and member_id != "coordinator":
                followed.gone_since, followed.load = now, None
        gone = sorted((item.gone_since or 0.0, name) for name, item in self.members.items() if item.gone_since)
        for _, name in gone[:-GONE_KEPT]:
            del self.members[name]
