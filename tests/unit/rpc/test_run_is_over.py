"""A member that was attached by hand goes when its run is over, and not before."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.rpc.client import open_channel
from paceline.rpc.ending import run_is_over
from paceline.rpc.status import Activity


class Coordinator(pb_grpc.CoordinatorServiceServicer):
    """Says what the run is, and that again whenever it is asked."""

    def __init__(self) -> None:
        self.state = pb.RUN_STATE_ACTIVE
        self.asked = asyncio.Event()

    async def WatchSteps(self, request: Any, context: Any) -> AsyncIterator[pb.WatchStepsResponse]:
        yield pb.WatchStepsResponse(run=pb.Run(run_id=request.run_id, state=self.state))
        self.asked.set()

    async def serve(self, port: int) -> grpc.aio.Server:
        server = grpc.aio.server()
        pb_grpc.add_CoordinatorServiceServicer_to_server(self, server)
        server.add_insecure_port(f"127.0.0.1:{port}")
        await server.start()
        return server

    async def said(self) -> None:
        self.asked.clear()
        await self.asked.wait()


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


async def test_a_run_that_was_taken_down_is_over_at_once(port: int) -> None:
    coordinator = Coordinator()
    coordinator.state = pb.RUN_STATE_STOPPED
    server = await coordinator.serve(port)
    async with asyncio.timeout(20), open_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        assert await run_is_over(stub, "sums", Activity("run")) == "run 'sums' was taken down"
    await server.stop(None)


async def test_a_finished_run_is_over_when_its_coordinator_has_gone(port: int) -> None:
    coordinator = Coordinator()
    server = await coordinator.serve(port)
    async with asyncio.timeout(60), open_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.CoordinatorServiceStub(channel)
        over = asyncio.create_task(run_is_over(stub, "sums", Activity("run"), gone_seconds=0.2))
        await coordinator.said()
        await server.stop(None)
        # Away during the run, for longer than the limit: it is waited for.
        await asyncio.wait({over}, timeout=2.5)
        assert not over.done()
        server = await coordinator.serve(port)
        coordinator.state = pb.RUN_STATE_FINISHED
        await coordinator.said()
        # Finished, and still served.
        await coordinator.said()
        await coordinator.said()
        assert not over.done()
        await server.stop(None)
        assert await over == "run 'sums' is finished and its coordinator has gone"
