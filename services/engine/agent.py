"""Keeps the engine at the newest published weights: it watches, opens, checks, applies and reports by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import grpc.aio

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.weights.v1 import weights_pb2
from paceline.bell import heard
from paceline.ids import new_id
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard
from paceline.telemetry import names
from paceline.telemetry.tracing import span
from paceline.weights.transports.base import Transport
from paceline.weights.watch import VersionWatch
from services.engine.backends.base import EngineBackend
from services.engine.generation import AppliedWeights, PauseMode

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
MAX_RETRY_SECONDS = 30.0


class WrongWeights(RuntimeError):
    """The engine holds other bytes than were published. Only a fresh process can be trusted."""


class WeightAgent:
    """Applies publications to a backend. `run` goes on for ever; several that wait are skipped for the newest."""

    def __init__(
        self,
        backend: EngineBackend,
        transport: Transport,
        stub: Any,
        board: StatusBoard,
        mode: PauseMode,
        report_now: Callable[[], None],
    ) -> None:
        self._backend = backend
        self._transport = transport
        self._stub = stub
        self._board = board
        self._mode: PauseMode = mode
        self._report_now = report_now
        self._activity = board.activity("weights")
        self._newest: weights_pb2.WeightVersion | None = None
        self._arrived = asyncio.Event()

    @property
    def newest_version(self) -> int:
        """The newest published version heard of, 0 before the first."""
        return self._newest.weight_version if self._newest is not None else 0

    async def run(self) -> None:
        """Follow and apply. WrongWeights ends the process."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._apply_newest())

    async def _follow(self) -> None:
        watch = VersionWatch(self._stub, self._board.run_id, self._board.activity("version watch"))
        async for version in watch.follow():
            self._newest = version
            self._arrived.set()

    async def _apply_newest(self) -> None:
        delay = 1.0
        while True:
            version = self._newest
            if version is None or version.weight_version <= self._backend.weight_version:
                delay = 1.0
                with self._activity.waiting(f"a weight version after {self._backend.weight_version}"):
                    await self._arrived.wait()
                self._arrived.clear()
                continue
            if await self._update(version):
                continue
            await self._pause(delay, f"weight version {version.weight_version}: the next try, or a later version")
            delay = min(2 * delay, MAX_RETRY_SECONDS)

    async def _update(self, version: weights_pb2.WeightVersion) -> bool:
        """Apply one version and report the outcome; False when it failed and the engine stays where it was."""
        number, board = version.weight_version, self._board
        self._activity.set(f"applying weight version {number}")
        if self._backend.weight_version:
            self._show("UPDATING")
        try:
            applied = await self._apply(version)
        except errors.PacelineError as error:
            log.error("weight version %d was not applied: %s", number, error)
            board.facts["weights_error"] = f"weight version {number}: {error}"
            self._show("READY" if self._backend.weight_version else "SYNCING")
            await self._report(number, error=str(error))
            return False
        if applied.digest != version.digest:
            raise WrongWeights(f"weight version {number}: engine holds digest {applied.digest}, not {version.digest}")
        board.facts.pop("weights_error", None)
        board.weight_version = number
        board.gauges["apply_pause_seconds"] = applied.pause_seconds
        self._show("READY")
        log.info("serving weight version %d; requests were held for %.3f s", number, applied.pause_seconds)
        await self._report(number, applied=applied)
        return True

    async def _apply(self, version: weights_pb2.WeightVersion) -> AppliedWeights:
        attributes = {
            names.ATTRIBUTE_WEIGHT_VERSION: version.weight_version,
            names.ATTRIBUTE_ENGINE_ID: self._board.member_id,
        }
        with span(names.SPAN_ENGINE_APPLY_WEIGHTS, attributes, parent=version.traceparent or None):
            directory = await asyncio.to_thread(self._transport.open, version.uri)
            with self._activity.waiting(f"the backend, to swap to weight version {version.weight_version}"):
                return await self._backend.apply(directory, version.weight_version, self._mode)

    def _show(self, state: str) -> None:
        self._board.state = state
        self._report_now()

    async def _report(self, number: int, applied: AppliedWeights | None = None, error: str = "") -> None:
        """Tell the coordinator, until it has heard or a later version makes it moot."""
        weights = weights_pb2.EngineWeights(
            engine_id=self._board.member_id, weight_version=number, applied=applied is not None, error=error
        )
        if applied is not None:
            weights.digest, weights.pause_seconds = applied.digest, applied.pause_seconds
        request = pb.ReportWeightsRequest(request_id=new_id(), run_id=self._board.run_id, weights=weights)
        while True:
            try:
                await self._stub.ReportWeights(request, timeout=CALL_SECONDS)
                return
            except grpc.aio.AioRpcError as failure:
                meant = errors.from_rpc(failure)
            if not isinstance(meant, errors.Unavailable | errors.DeadlineExceeded | errors.ResourceExhausted):
                log.error("the coordinator refused the report on weight version %d: %s", number, meant)
                return
            await self._pause(0.5, f"coordinator, ReportWeights: {meant.message}")
            if self.newest_version > number:
                return

    async def _pause(self, seconds: float, cause: str) -> None:
        """Wait until a version arrives, for at most `seconds`."""
        with self._activity.waiting(cause, seconds):
            if await heard(self._arrived, seconds):
                self._arrived.clear()
