"""All requests under way: one for each id, ended by abort, moved off an engine that is lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import grpc.aio

from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.bell import heard
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard
from services.router.flight import ABORT_SECONDS, Flight
from services.router.placement import Placement
from services.router.table import EngineTable
from services.router.versions import PublishedVersions

log = logging.getLogger(__name__)

END_SECONDS = 1.5 * ABORT_SECONDS
"""How long a request waits for an earlier one of its id, whose caller may just have gone."""
LOST_AFTER_PROBES = 2
"""Failed probes in a row after which requests leave an engine, when another one can take them."""


class Flights:
    """The requests under way, by id."""

    def __init__(
        self,
        table: EngineTable,
        placement: Placement,
        versions: PublishedVersions,
        board: StatusBoard,
        max_retries: int,
    ) -> None:
        self._table = table
        self._placement = placement
        self._versions = versions
        self._board = board
        self._max_retries = max_retries
        self._flights: dict[str, Flight] = {}

    async def open(self, request: generation_pb.GenerationInput, deadline: float) -> Flight:
        """Start a request. AlreadyExists while one of the same id is running; one that is just ending is waited for."""
        earlier = self._flights.get(request.request_id)
        if earlier is not None:
            await self._wait_end(earlier)
        flight = Flight(request, deadline, self._table, self._placement, self._versions, self._max_retries)
        self._flights[request.request_id] = flight
        flight.start(lambda: self._closed(flight))
        self._show()
        return flight

    async def abort(self, request_ids: Sequence[str], everything: bool) -> int:
        """End requests wherever they run and return how many were reached. Ids unknown here go to every engine."""
        wanted = list(self._flights) if everything else list(dict.fromkeys(request_ids))
        here = [self._flights[item] for item in wanted if item in self._flights]
        elsewhere = [item for item in wanted if item not in self._flights]
        results = await asyncio.gather(
            *(flight.abort() for flight in here), self._abort_elsewhere(elsewhere, everything)
        )  # fmt: skip
        return len(here) + int(results[-1] or 0)

    async def move_off_lost_engines(self) -> None:
        """For ever: requests on an engine that is gone or hangs go to another, where there is one."""
        while True:
            change = self._table.change()
            for flight in list(self._flights.values()):
                engine = flight.rank.engine if flight.rank is not None else None
                lost = engine is not None and (engine.gone or engine.failed_probes >= LOST_AFTER_PROBES)
                if lost and self._placement.candidates(flight.wanted()):
                    flight.evict()
            await change.wait()

    async def _abort_elsewhere(self, request_ids: list[str], everything: bool) -> int:
        if not request_ids and not everything:
            return 0
        request = engine_pb.AbortRequest(request_ids=request_ids, all=everything)
        calls = [engine.stub.Abort(request, timeout=ABORT_SECONDS) for engine in self._table.engines]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, grpc.aio.AioRpcError):
                raise answer
        return (
            0
            if everything
            else sum(answer.num_aborted > 0 for answer in answers if not isinstance(answer, BaseException))
        )

    async def _wait_end(self, earlier: Flight) -> None:
        if not await heard(earlier.done, END_SECONDS):
            raise errors.AlreadyExists(
                f"request {earlier.request.request_id!r} is running; abort it first, or use another request_id"
            )

    def _closed(self, flight: Flight) -> None:
        if self._flights.get(flight.request.request_id) is flight:
            del self._flights[flight.request.request_id]
        self._show()

    def _show(self) -> None:
        self._board.gauges["num_in_flight"] = len(self._flights)
