"""The coordinator over a store that is killed or frozen: it says so, stays up, and goes on where it was."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.ids import new_id
from paceline.launcher.redis_server import RedisServer
from paceline.rpc.client import open_channel
from paceline.rpc.status import StatusBoard
from paceline.testing.processes import service_process
from paceline.weights.watch import VersionWatch

RUN = "stored"
RUN_FILE = f"""
[run]
name = "{RUN}"
[model]
path = "model"
[data]
source = {{name = "jsonl", path = "data.jsonl"}}
[[reward.graders]]
name = "exact_match"
"""


class Store:
    """A Redis process that can be killed and started again over the same files."""

    def __init__(self, folder: Path) -> None:
        self.server = RedisServer(folder)
        folder.mkdir()
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        command = self.server.spec().argv()
        assert command[0] == sys.executable
        self.process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
        async with asyncio.timeout(30):
            await self.server.until_ready()

    async def kill(self) -> None:
        assert self.process is not None
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()


async def publish(stub: Any, digest: str, timeout: float = 30.0) -> int:
    acquire = pb.AcquireTrainerRequest(request_id=new_id(), run_id=RUN, incarnation="trainer")
    fence = (await stub.AcquireTrainer(acquire, timeout=timeout)).fence
    prepare = pb.PrepareVersionRequest(request_id=new_id(), run_id=RUN, fence=fence, digest=digest)
    number = (await stub.PrepareVersion(prepare, timeout=timeout)).version.weight_version
    commit = pb.CommitVersionRequest(request_id=new_id(), run_id=RUN, fence=fence, weight_version=number, uri="/w")
    return (await stub.CommitVersion(commit, timeout=timeout)).version.weight_version


async def test_killed_and_frozen_store(tmp_path: Path) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE)
    store = Store(tmp_path / "redis")
    await store.start()
    try:
        async with service_process("coordinator", run_file, redis_url=store.server.url) as (process, address):
            channel = open_channel(address)
            stub = pb_grpc.CoordinatorServiceStub(channel)
            board = StatusBoard("engine", "engine-0", "i", RUN)
            versions = VersionWatch(stub, RUN, board.activity("weights")).follow(1)
            assert await publish(stub, "one") == 1
            assert (await anext(versions)).weight_version == 1

            await store.kill()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await publish(stub, "lost")
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            assert "Redis" in (caught.value.details() or "")

            await store.start()
            assert await publish(stub, "two") == 2
            assert (await anext(versions)).weight_version == 2

            assert store.process is not None
            store.process.send_signal(signal.SIGSTOP)
            waiting = asyncio.ensure_future(publish(stub, "three"))
            await asyncio.wait({waiting}, timeout=1.0)
            assert not waiting.done()
            store.process.send_signal(signal.SIGCONT)
            assert await waiting == 3
            assert (await anext(versions)).weight_version == 3
            assert process.returncode is None
            await channel.close()
    finally:
        await store.kill()
