"""The engine process with a real coordinator: it pulls what is published, and a killed one catches up by itself."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline import arrays
from paceline.api.common.v1 import generation_pb2, status_service_pb2, status_service_pb2_grpc
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.engine.v1 import engine_service_pb2, engine_service_pb2_grpc
from paceline.ids import new_id
from paceline.rpc.client import open_channel
from paceline.testing.processes import service_process
from paceline.weights.manifest import Manifest
from paceline.weights.transports.disk import Disk

MODEL = Path(__file__).parents[2] / "assets" / "sort4"
RUN = "engine-run"
CALL = {"timeout": 20.0, "wait_for_ready": True}
RUN_FILE = f"""
[run]
name = "{RUN}"
directory = "{{directory}}"
[model]
path = "{MODEL}"
[data]
source = {{{{name = "jsonl", path = "data.jsonl"}}}}
[engine]
max_sequences = 16
max_sequence_length = 128
[weights]
transport = {{{{name = "disk"}}}}
[[reward.graders]]
name = "exact_match"
"""


class Run:
    """A coordinator, a trainer's part of publishing, and one engine."""

    def __init__(self, directory: Path, stub: Any, run_file: Path, coordinator_address: str) -> None:
        self.stub = stub
        self.run_file = run_file
        self.coordinator_address = coordinator_address
        self.transport = Disk(Disk.Options(), directory, RUN)

    async def publish(self, step: int, break_it: bool = False) -> int:
        """Publish the test model as the next version."""
        acquire = pb.AcquireTrainerRequest(request_id=new_id(), run_id=RUN, incarnation=new_id())
        fence = (await self.stub.AcquireTrainer(acquire, **CALL)).fence
        digest = Manifest.describe(MODEL, 1, step, "full").digest
        prepare = pb.PrepareVersionRequest(request_id=new_id(), run_id=RUN, fence=fence, step=step, digest=digest)
        number = (await self.stub.PrepareVersion(prepare, **CALL)).version.weight_version
        stage = self.transport.stage(number)
        shutil.copy(MODEL / "model.safetensors", stage)
        Manifest.describe(stage, number, step, "full").write(stage)
        if break_it:
            (stage / "model.safetensors").write_bytes(b"torn")
        uri = self.transport.publish(stage, number)
        commit = pb.CommitVersionRequest(request_id=new_id(), run_id=RUN, fence=fence, weight_version=number, uri=uri)
        await self.stub.CommitVersion(commit, **CALL)
        return number

    async def outcome(self, version: int) -> Any:
        """The engine's report on a version."""
        async with asyncio.timeout(60):
            while True:
                request = pb.GetVersionRequest(run_id=RUN, weight_version=version)
                response = await self.stub.GetVersion(request, **CALL)
                if response.engines:
                    return response
                await asyncio.sleep(0.05)


@pytest.fixture
async def run(tmp_path: Path, redis_url: str, redis_client: Any) -> AsyncIterator[Run]:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(directory=tmp_path / "out"))
    async with service_process("coordinator", path, redis_url=redis_url) as (_, address):
        channel = open_channel(address)
        yield Run(tmp_path / "out", pb_grpc.CoordinatorServiceStub(channel), path, address)
        await channel.close()


async def sample(stub: Any, seed: int = 1) -> tuple[list[int], list[tuple[int, int]]]:
    message = generation_pb2.GenerationInput(
        request_id=new_id(), run_id=RUN, prompt_token_ids=arrays.to_wire(np.asarray([5, 4, 3, 2, 42], np.int32)),
        sampling=generation_pb2.SamplingParams(temperature=1.0, max_new_tokens=12, ignore_eos=True), seeds=[seed],
    )  # fmt: skip
    async for response in stub.Generate(engine_service_pb2.GenerateRequest(input=message), timeout=30):
        output = response.output
        spans = [(item.weight_version, item.num_tokens) for item in output.version_spans]
        return arrays.from_wire(output.token_ids, "token_ids").tolist(), spans
    raise AssertionError("no output")


async def test_an_engine_serves_what_is_published_and_a_killed_one_catches_up(run: Run):
    async with service_process("engine", run.run_file, coordinator=run.coordinator_address) as (process, address):
        async with open_channel(address) as channel:
            stub = engine_service_pb2_grpc.EngineServiceStub(channel)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sample(stub)
            assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
            first = await run.publish(0)
            response = await run.outcome(first)
            assert response.engines[0].applied
            assert response.engines[0].digest == response.version.digest
            tokens, spans = await sample(stub)
            assert spans == [(first, 12)]
        await process.kill()
        second = await run.publish(1)
        await process.start()
        response = await run.outcome(second)
        assert response.engines[0].applied
        async with open_channel(address) as channel:
            stub = engine_service_pb2_grpc.EngineServiceStub(channel)
            again, spans = await sample(stub)
            status = status_service_pb2_grpc.StatusServiceStub(channel)
            board = await status.GetStatus(status_service_pb2.GetStatusRequest(), timeout=10)
        assert again == tokens
        assert spans == [(second, 12)]
        assert board.state == "READY"
        assert {"running", "waiting", "tokens_per_second", "cache_use"} <= set(board.gauges)
        assert {"model", "device", "dtype"} <= set(board.facts)
        assert await process.stop() == 0


async def test_a_torn_publication_is_reported_and_the_engine_goes_on_with_the_version_it_has(run: Run):
    async with service_process("engine", run.run_file, coordinator=run.coordinator_address) as (_, address):
        good = await run.publish(0)
        await run.outcome(good)
        torn = await run.publish(1, break_it=True)
        response = await run.outcome(torn)
        assert not response.engines[0].applied
        assert "torn" in response.engines[0].error
        async with open_channel(address) as channel:
            _, spans = await sample(engine_service_pb2_grpc.EngineServiceStub(channel))
        assert spans == [(good, 12)]
        newest = await run.publish(2)
        assert (await run.outcome(newest)).engines[0].applied
