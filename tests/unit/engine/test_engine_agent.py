"""The weight agent against a coordinator of a few lines over real gRPC, and a backend that only remembers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.rpc import errors
from paceline.rpc.client import open_channel
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard
from services.engine.agent import WeightAgent, WrongWeights
from services.engine.generation import AppliedWeights


class Coordinator(pb_grpc.CoordinatorServiceServicer):
    """Commits versions and hears reports."""

    def __init__(self) -> None:
        self.versions: list[weights_pb2.WeightVersion] = []
        self.reports: list[weights_pb2.EngineWeights] = []
        self.deaf = 0
        self.changed = asyncio.Condition()

    async def commit(self, number: int) -> None:
        async with self.changed:
            self.versions.append(
                weights_pb2.WeightVersion(weight_version=number, digest=f"d{number}", uri=f"/v{number}")
            )
            self.changed.notify_all()

    async def reported(self, number: int, applied: bool) -> weights_pb2.EngineWeights:
        def find() -> list[weights_pb2.EngineWeights]:
            return [item for item in self.reports if (item.weight_version, item.applied) == (number, applied)]

        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(find)
        return find()[0]

    async def WatchVersions(self, request, context):
        position = 0 if request.start_version else max(0, len(self.versions) - 1)
        while True:
            async with self.changed:
                await self.changed.wait_for(lambda: len(self.versions) > position)  # noqa: B023 - read at once
                ready = self.versions[position:]
            position += len(ready)
            for version in ready:
                if version.weight_version >= request.start_version:
                    yield pb.WatchVersionsResponse(version=version)

    async def ReportWeights(self, request, context):
        async with self.changed:
            if self.deaf:
                self.deaf -= 1
                await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "busy")
            self.reports.append(request.weights)
            self.changed.notify_all()
        return pb.ReportWeightsResponse()


class Backend:
    """Takes what it is given, unless told to fail; `gate` holds an update."""

    def __init__(self) -> None:
        self.weight_version = 0
        self.applied: list[int] = []
        self.failures: dict[int, int] = {}
        self.gate = asyncio.Event()
        self.gate.set()
        self.digest = "d{}"

    async def apply(self, directory: Path, weight_version: int, mode: str) -> AppliedWeights:
        await self.gate.wait()
        if self.failures.get(weight_version, 0):
            self.failures[weight_version] -= 1
            raise errors.DataLoss(f"{directory} is torn")
        self.weight_version = weight_version
        self.applied.append(weight_version)
        return AppliedWeights(self.digest.format(weight_version), 0.25)


class Transport:
    def open(self, uri: str) -> Path:
        return Path(uri)


class Bench:
    def __init__(self, stub, coordinator: Coordinator) -> None:
        self.coordinator = coordinator
        self.backend = Backend()
        self.board = StatusBoard("engine", "engine-0", "one", "run", state="SYNCING")
        self.states: list[str] = []
        self.agent = WeightAgent(
            self.backend, Transport(), stub, self.board, "in_place", lambda: self.states.append(self.board.state)
        )  # type: ignore[arg-type]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    coordinator = Coordinator()
    server = RpcServer(StatusBoard("coordinator", "coordinator-0", "one", "run"))
    address = server.bind("127.0.0.1:0")
    pb_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server.server)
    await server.start()
    async with open_channel(address) as channel:
        yield Bench(pb_grpc.CoordinatorServiceStub(channel), coordinator)
    await server.stop(0)


@contextlib.asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[asyncio.Task]:
    task = asyncio.create_task(bench.agent.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_fresh_engine_takes_the_newest_version_and_becomes_ready(bench: Bench):
    for number in (3, 4, 5):
        await bench.coordinator.commit(number)
    async with running(bench):
        report = await bench.coordinator.reported(5, applied=True)
    assert (report.engine_id, report.digest, report.pause_seconds) == ("engine-0", "d5", 0.25)
    assert bench.backend.applied == [5]
    assert (bench.board.state, bench.board.weight_version) == ("READY", 5)
    assert bench.states == ["READY"]


async def test_later_versions_go_through_updating_and_those_that_pile_up_are_skipped(bench: Bench):
    await bench.coordinator.commit(1)
    async with running(bench):
        await bench.coordinator.reported(1, applied=True)
        bench.backend.gate.clear()
        await bench.coordinator.commit(2)
        async with asyncio.timeout(20):
            while bench.board.state != "UPDATING":  # noqa: ASYNC110 - a plain field
                await asyncio.sleep(0)
        for number in (3, 4, 5):
            await bench.coordinator.commit(number)
        async with asyncio.timeout(20):
            while bench.agent.newest_version < 5:  # noqa: ASYNC110 - a plain field
                await asyncio.sleep(0)
        bench.backend.gate.set()
        await bench.coordinator.reported(5, applied=True)
    assert bench.backend.applied == [1, 2, 5]
    assert bench.states == ["READY", "UPDATING", "READY", "UPDATING", "READY"]


async def test_a_failed_update_is_reported_leaves_the_engine_ready_and_is_tried_again(bench: Bench):
    await bench.coordinator.commit(1)
    bench.backend.failures[2] = 1
    async with running(bench):
        await bench.coordinator.reported(1, applied=True)
        await bench.coordinator.commit(2)
        report = await bench.coordinator.reported(2, applied=False)
        assert "/v2 is torn" in report.error
        assert (bench.board.state, bench.board.weight_version) == ("READY", 1)
        assert "torn" in bench.board.facts["weights_error"]
        await bench.coordinator.reported(2, applied=True)
    assert bench.board.weight_version == 2
    assert "weights_error" not in bench.board.facts


async def test_a_later_version_ends_the_wait_after_a_failure(bench: Bench):
    bench.backend.failures[1] = 1000
    await bench.coordinator.commit(1)
    async with running(bench):
        await bench.coordinator.reported(1, applied=False)
        assert bench.board.state == "SYNCING"
        await bench.coordinator.commit(2)
        await bench.coordinator.reported(2, applied=True)
    assert bench.backend.applied == [2]


async def test_a_coordinator_that_cannot_hear_is_told_again(bench: Bench):
    bench.coordinator.deaf = 2
    await bench.coordinator.commit(1)
    async with running(bench):
        await bench.coordinator.reported(1, applied=True)
    assert len(bench.coordinator.reports) == 1


async def test_other_bytes_than_were_published_end_the_process(bench: Bench):
    bench.backend.digest = "wrong"
    await bench.coordinator.commit(1)
    async with running(bench) as task:
        with pytest.raises(ExceptionGroup) as caught:
            async with asyncio.timeout(20):
                await task
    assert caught.group_contains(WrongWeights, match="wrong")
    assert bench.board.weight_version == 0
