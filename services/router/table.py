"""The engine table: who could generate, with which weights, and why an engine may not.

An engine is identified by its id, its address and its incarnation, each on its own: a process that comes back under the
same id and address is another engine, which has to prove itself again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from paceline.bell import Bell
from paceline.rpc.client import open_channel
from services.router.versions import PublishedVersions

log = logging.getLogger(__name__)

SERVING_STATES = ("READY", "UPDATING")
_MAX_DP_SIZE = 1024


@dataclass(eq=False)
class Engine:
    """One engine process."""

    engine_id: str
    address: str
    incarnation: str
    stub: engine_grpc.EngineServiceAsyncStub
    channel: Any
    state: str = "STARTING"
    weight_version: int = 0
    healthy: bool = False
    unhealthy_reason: str = "not probed yet"
    failed_probes: int = 0
    quarantine: str = ""
    """Set when it answered with weights that were never published; cleared by a new incarnation or another version."""
    gone: bool = False
    ranks: list[Rank] = field(default_factory=list)
    probe_now: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def serving(self) -> bool:
        """Whether it says that it can generate."""
        return self.state in SERVING_STATES and self.weight_version >= 1


@dataclass(eq=False)
class Rank:
    """One data-parallel rank of an engine: the unit of placement."""

    engine: Engine
    dp_rank: int
    num_in_flight: int = 0
    """Samples."""
    last_placed: int = 0
    """Order number of the last request placed here."""
    num_requests: int = 0

    @property
    def key(self) -> tuple[str, str, str, int]:
        """(engine_id, address, incarnation, dp_rank)."""
        return (self.engine.engine_id, self.engine.address, self.engine.incarnation, self.dp_rank)

    def take(self, num_samples: int, order: int) -> None:
        """Count a request that is placed here."""
        self.num_in_flight += num_samples
        self.last_placed = order
        self.num_requests += 1


class EngineTable:
    """Engines by (engine_id, address, incarnation), kept by the members of the run. `connect` opens a channel."""

    def __init__(self, versions: PublishedVersions, connect: Callable[[str], Any] | None = None) -> None:
        self._versions = versions
        self._connect = connect or (lambda address: open_channel(address, retries=False))
        self._engines: dict[tuple[str, str, str], Engine] = {}
        self._leaving: list[Engine] = []
        self._bell = Bell()
        versions.on_change(self.notify)

    @property
    def engines(self) -> list[Engine]:
        """Live engines by id."""
        return sorted(self._engines.values(), key=lambda item: (item.engine_id, item.address))

    @property
    def ranks(self) -> list[Rank]:
        """Every rank of every live engine."""
        return [rank for engine in self.engines for rank in engine.ranks]

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        self._bell.ring()

    def change(self) -> asyncio.Event:
        """An event that is set at the next change. Take it before looking at the table."""
        return self._bell.ticket()

    async def follow(self, feed: AsyncIterable[Sequence[coordinator_pb.Member]]) -> None:
        """Apply every membership of the feed, for ever."""
        async for members in feed:
            await self.update(members)

    async def update(self, members: Sequence[coordinator_pb.Member]) -> None:
        """Make the table what the coordinator says."""
        live = _one_by_address([member for member in members if member.service == "engine"])
        keys = {(member.member_id, member.address, member.incarnation) for member in live}
        removed = [self._engines.pop(key) for key in list(self._engines) if key not in keys]
        for member in live:
            self._apply(member)
        for engine in removed:
            engine.gone = True
            log.info("engine %s at %s left", engine.engine_id, engine.address)
        self.notify()
        self._leaving += removed
        # Running calls keep the channel of an engine that left until they end.
        idle = [item for item in self._leaving if not any(rank.num_in_flight for rank in item.ranks)]
        self._leaving = [item for item in self._leaving if item not in idle]
        for engine in idle:
            await engine.channel.close()

    def _apply(self, member: coordinator_pb.Member) -> None:
        key = (member.member_id, member.address, member.incarnation)
        engine = self._engines.get(key)
        if engine is None:
            channel = self._connect(member.address)
            stub = engine_grpc.EngineServiceStub(channel)
            engine = Engine(member.member_id, member.address, member.incarnation, stub, channel)
            engine.ranks = [Rank(engine, rank) for rank in range(_dp_size(member))]
            self._engines[key] = engine
            log.info("engine %s at %s joined (%s)", member.member_id, member.address, member.incarnation[:8])
        was_serving = engine.serving
        if engine.weight_version != member.weight_version:
            engine.quarantine = ""
        engine.state, engine.weight_version = member.state, member.weight_version
        if engine.serving and not was_serving:
            engine.probe_now.set()
        if engine.weight_version >= 1 and not self._versions.known(engine.weight_version):
            self._versions.look_up(engine.weight_version)

    def excluded_reason(self, engine: Engine) -> str:
        """Why no request goes to an engine now, as the end of "engine-0 ..."; empty when requests may."""
        if engine.gone:
            return "left"
        if engine.state not in SERVING_STATES:
            return f"is {engine.state}"
        if engine.weight_version < 1:
            return "serves no published weight version"
        if not self._versions.known(engine.weight_version):
            return f"serves weight version {engine.weight_version}, which the coordinator does not know"
        if engine.quarantine:
            return engine.quarantine
        if not engine.healthy:
            return f"is unhealthy: {engine.unhealthy_reason}"
        return ""

    def mark_unhealthy(self, engine: Engine, reason: str, probe: bool = True) -> None:
        """Take an engine out until a probe passes; `probe` asks for one at once."""
        if engine.healthy:
            log.warning("engine %s at %s is unhealthy: %s", engine.engine_id, engine.address, reason)
        engine.healthy, engine.unhealthy_reason = False, reason
        if probe:
            engine.probe_now.set()
        self.notify()

    def mark_healthy(self, engine: Engine) -> None:
        """A probe passed."""
        engine.failed_probes = 0
        if not engine.healthy:
            engine.healthy, engine.unhealthy_reason = True, ""
            self.notify()

    def set_quarantine(self, engine: Engine, reason: str) -> None:
        """Take an engine out until it holds other weights."""
        log.error("engine %s at %s %s", engine.engine_id, engine.address, reason)
        engine.quarantine = reason
        self.notify()

    async def close(self) -> None:
        """Close every channel."""
        for engine in [*self._engines.values(), *self._leaving]:
            await engine.channel.close()


def _one_by_address(members: list[coordinator_pb.Member]) -> list[coordinator_pb.Member]:
    """Only the newest member of each address: an older lease there belongs to a process that is gone."""
    newest: dict[str, coordinator_pb.Member] = {}
    for member in sorted(members, key=lambda item: item.registered_time.ToNanoseconds()):
        newest[member.address] = member
    return list(newest.values())


def _dp_size(member: coordinator_pb.Member) -> int:
    text = member.labels.get("dp_size", "1")
    if not text.isdecimal() or not 1 <= int(text) <= _MAX_DP_SIZE:
        log.warning("engine %s: label dp_size = %r is not in 1 to %d; taken as 1", member.member_id, text, _MAX_DP_SIZE)
        return 1
    return int(text)
