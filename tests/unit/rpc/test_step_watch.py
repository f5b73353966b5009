"""Records of a run reach a watcher whatever its coordinator goes through, up to the end of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.rpc import deadlines, errors
from paceline.rpc.client import open_channel
from paceline.rpc.status import Activity
from paceline.rpc.steps import StepWatch

ACTIVE = pb.WatchStepsResponse(run=pb.Run(run_id="r", state=pb.RUN_STATE_ACTIVE))
FINISHED = pb.WatchStepsResponse(run=pb.Run(run_id="r", state=pb.RUN_STATE_FINISHED))


def record(step: int, reward: float) -> pb.WatchStepsResponse:
    return pb.WatchStepsResponse(record=pb.StepRecord(step=step, values={"reward/mean": reward}))


class Coordinator(pb_grpc.CoordinatorServiceServicer):
    """Plays one script a stream; a status code in it ends the stream with that error."""

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.requests: list[pb.WatchStepsRequest] = []

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[pb.WatchStepsResponse]:
        self.requests.append(request)
        for item in self.scripts.pop(0):
            if isinstance(item, grpc.StatusCode):
                await context.abort(item, "scripted")
            yield item


async def watched(coordinator: Coordinator) -> tuple[StepWatch, list[tuple[int, float]]]:
    server = grpc.aio.server()
    pb_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with asyncio.timeout(30), open_channel(f"127.0.0.1:{port}") as channel:
            watch = StepWatch(pb_grpc.CoordinatorServiceStub(channel), "r", Activity("steps"), start_step=1)
            found = []
            async for response in watch.until_ended():
                if response.HasField("record"):
                    found.append((response.record.step, response.record.values["reward/mean"]))
            return watch, found
    finally:
        await server.stop(None)


async def test_a_broken_stream_is_read_again_from_the_first_record() -> None:
    coordinator = Coordinator(
        [record(1, 0.1), ACTIVE, grpc.StatusCode.ABORTED],
        [record(1, 0.2), ACTIVE],  # an orderly end while the run goes on: the coordinator stops for a restart
        [record(1, 0.2), record(2, 0.3), FINISHED],
    )
    watch, found = await watched(coordinator)
    assert found == [(1, 0.1), (1, 0.2), (1, 0.2), (2, 0.3)]
    assert watch.ended and watch.run is not None and watch.run.state == pb.RUN_STATE_FINISHED
    assert [request.start_step for request in coordinator.requests] == [1, 1, 1]


async def test_a_wrong_request_is_not_repeated() -> None:
    with pytest.raises(errors.InvalidArgument, match="scripted"):
        await watched(Coordinator([grpc.StatusCode.INVALID_ARGUMENT]))


def test_a_handler_takes_a_little_less_than_its_caller_has() -> None:
    assert deadlines.own_seconds(100.0) == 99.5
    assert deadlines.own_seconds(1.0) == 0.8
    assert deadlines.own_seconds(-1.0) == 0.0
    assert deadlines.own_seconds(None, 60.0) == 60.0
    assert deadlines.own_seconds(1e12) == deadlines.MAX_SECONDS - 0.5
