"""Health: every engine must generate a token now and then; one that cannot gets no requests until it can."""

from __future__ import annotations

import asyncio

import grpc.aio

from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.bell import heard
from paceline.rpc import errors
from services.router.table import Engine, EngineTable
from services.router.versions import PublishedVersions


class HealthProber:
    """Probes each engine of the table that says it serves, at once when it joins or a request fails, then regularly."""

    def __init__(
        self, table: EngineTable, versions: PublishedVersions, every_seconds: float, timeout_seconds: float
    ) -> None:
        self._table = table
        self._versions = versions
        self._every_seconds = every_seconds
        self._timeout_seconds = timeout_seconds

    async def run(self) -> None:
        """For ever: one task for each engine of the table."""
        watched: dict[Engine, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:
            while True:
                change = self._table.change()
                live = self._table.engines
                for engine in live:
                    if engine not in watched:
                        watched[engine] = group.create_task(self._watch(engine), name=f"probe {engine.engine_id}")
                for engine in [item for item in watched if item not in live]:
                    watched.pop(engine).cancel()
                await change.wait()

    async def _watch(self, engine: Engine) -> None:
        while True:
            if engine.serving:
                await self.probe(engine)
            await heard(engine.probe_now, self._every_seconds)

    async def probe(self, engine: Engine) -> None:
        """Ask for one token and note the outcome in the table."""
        engine.probe_now.clear()
        try:
            answer = await engine.stub.Probe(engine_pb.ProbeRequest(), timeout=self._timeout_seconds)
            if not await self._versions.is_published(answer.weight_version):
                self._failed(engine, f"probe answered with unpublished weight version {answer.weight_version}")
                return
        except grpc.aio.AioRpcError as error:
            self._failed(engine, f"probe failed: {error.code().name} {error.details() or ''}".rstrip())
        except errors.Unavailable as error:
            self._failed(engine, error.message)
        else:
            self._table.mark_healthy(engine)

    def _failed(self, engine: Engine, reason: str) -> None:
        engine.failed_probes += 1
        self._table.mark_unhealthy(engine, reason, probe=False)
