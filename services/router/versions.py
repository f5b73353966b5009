"""Which weight versions were published: the router believes the coordinator here, never an engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterable, Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.rpc import errors

log = logging.getLogger(__name__)

LOOKUP_SECONDS = 5.0


class HasVersion(Protocol):
    """A published version, as far as the router cares."""

    @property
    def weight_version(self) -> int: ...


class PublishedVersions:
    """The committed versions. `lookup` asks the coordinator about one version that the watch did not bring."""

    def __init__(self, lookup: Callable[[int], Awaitable[bool]]) -> None:
        self._lookup = lookup
        self._known: set[int] = set()
        self._pending: dict[int, asyncio.Task[bool | None]] = {}
        self._listeners: list[Callable[[], None]] = []
        self.newest = 0

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever a version becomes known."""
        self._listeners.append(listener)

    def known(self, weight_version: int) -> bool:
        """Whether it is known to be published."""
        return weight_version in self._known

    def add(self, weight_version: int) -> None:
        """A committed version."""
        self._known.add(weight_version)
        self.newest = max(self.newest, weight_version)
        for listener in self._listeners:
            listener()

    async def follow(self, feed: AsyncIterable[HasVersion]) -> None:
        """Learn every version of the feed, for ever."""
        async for version in feed:
            self.add(version.weight_version)

    def look_up(self, weight_version: int) -> asyncio.Task[bool | None]:
        """Ask the coordinator, once at a time for each version; what it knows becomes known here.

        The result is None when the coordinator could not be asked.
        """
        task = self._pending.get(weight_version)
        if task is None:
            task = asyncio.create_task(self._ask(weight_version), name=f"look up version {weight_version}")
            self._pending[weight_version] = task
            task.add_done_callback(lambda _: self._pending.pop(weight_version, None))
        return task

    async def is_published(self, weight_version: int) -> bool:
        """Whether a version that an engine claims exists. errors.Unavailable when the coordinator cannot be asked."""
        if weight_version < 1:
            return False
        if self.known(weight_version):
            return True
        found = await asyncio.shield(self.look_up(weight_version))
        if found is None:
            raise errors.Unavailable(
                f"cannot confirm weight version {weight_version}: the coordinator did not answer; try again", 0.5
            )
        return found

    async def _ask(self, weight_version: int) -> bool | None:
        try:
            found = await self._lookup(weight_version)
        except errors.PacelineError as error:
            log.warning("cannot ask about weight version %d: %s", weight_version, error.message)
            return None
        if found:
            self.add(weight_version)
        return found


def coordinator_lookup(stub: pb_grpc.CoordinatorServiceAsyncStub, run_id: str) -> Callable[[int], Awaitable[bool]]:
    """A lookup by GetVersion."""

    async def lookup(weight_version: int) -> bool:
        try:
            request = pb.GetVersionRequest(run_id=run_id, weight_version=weight_version)
            response = await stub.GetVersion(request, timeout=LOOKUP_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.OUT_OF_RANGE):
                return False
            raise errors.from_rpc(error) from error
        return response.version.state == weights_pb2.PUBLICATION_STATE_COMMITTED

    return lookup
