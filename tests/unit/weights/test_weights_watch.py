"""A watch whose next version was trimmed from the history: over real gRPC, by a coordinator of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.rpc import errors
from paceline.rpc.client import open_channel
from paceline.rpc.server import RpcServer
from paceline.rpc.status import Activity, StatusBoard
from paceline.weights.watch import VersionWatch

NEWEST = 9


class Coordinator(pb_grpc.CoordinatorServiceServicer):
    """Has forgotten everything before NEWEST; the first stream ends after version 1, long ago."""

    def __init__(self) -> None:
        self.starts: list[int] = []

    async def WatchVersions(self, request: Any, context: Any) -> AsyncIterator[pb.WatchVersionsResponse]:
        self.starts.append(request.start_version)
        if len(self.starts) == 1:
            yield pb.WatchVersionsResponse(version=weights_pb2.WeightVersion(weight_version=1))
        elif 0 < request.start_version < NEWEST:
            raise errors.OutOfRange(f"weight version {request.start_version} was trimmed")
        else:
            yield pb.WatchVersionsResponse(version=weights_pb2.WeightVersion(weight_version=NEWEST))


@pytest.fixture
async def served() -> AsyncIterator[tuple[Coordinator, VersionWatch]]:
    coordinator, server = Coordinator(), RpcServer(StatusBoard("coordinator", "coordinator-0", "i", "r"))
    pb_grpc.add_CoordinatorServiceServicer_to_server(coordinator, server.server)
    address = server.bind("127.0.0.1:0")
    await server.start()
    async with open_channel(address) as channel:
        yield coordinator, VersionWatch(pb_grpc.CoordinatorServiceStub(channel), "r", Activity("versions"))
    await server.stop(0)


async def test_a_watch_of_the_newest_goes_on_at_the_newest(served: tuple[Coordinator, VersionWatch]) -> None:
    coordinator, watch = served
    versions = watch.follow()
    async with asyncio.timeout(30):
        assert [(await anext(versions)).weight_version for _ in range(2)] == [1, NEWEST]
    assert coordinator.starts == [0, 2, 0]


async def test_a_watch_from_a_version_says_that_it_is_gone(served: tuple[Coordinator, VersionWatch]) -> None:
    versions = served[1].follow(1)
    async with asyncio.timeout(30):
        assert (await anext(versions)).weight_version == 1
        with pytest.raises(errors.OutOfRange, match="weight version 2 was trimmed"):
            await anext(versions)
