"""trainer.loop = false: clients train, publish and sample over gRPC, and the trainer stays until the run is ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from trainer_run import CALL, MODEL, wait_for_state

from paceline import arrays
from paceline.api.common.v1 import generation_pb2
from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from paceline.api.trainer.v1 import trainer_service_pb2 as pb
from paceline.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from paceline.ids import new_id
from paceline.rpc.client import open_channel
from paceline.testing.processes import ServiceProcess, service_process

RUN = "notebook"
PROMPT = [3, 4, 5]
RUN_FILE = f"""
[run]
name = "{RUN}"
directory = "{{directory}}"
[model]
path = "{MODEL}"
[engine]
max_sequence_length = 32
[trainer]
loop = false
[weights]
transport = {{{{name = "disk"}}}}
"""
pytestmark = pytest.mark.timeout(300)


@dataclass
class Notebook:
    """What a client of the gateway will do, without the gateway."""

    trainer: ServiceProcess
    stub: Any
    coordinator: Any
    run_file: Path
    address: str
    """Of the coordinator."""
    engine: Any = None

    async def train(self, target: int, steps: int) -> int:
        """Teach the policy that `target` follows the prompt; the optimizer's step afterwards."""
        datum = pb.Datum(token_ids=arrays.to_wire(np.array([*PROMPT, target], np.int32)), temperature=1.0)
        datum.loss_inputs["weights"].CopyFrom(arrays.to_wire(np.array([0, 0, 0, 1], np.float32)))
        done = 0
        for _ in range(steps):
            backward = pb.ForwardBackwardRequest(request_id=new_id(), data=[datum], loss="cross_entropy")
            await self.stub.ForwardBackward(backward, **CALL)
            step = pb.OptimStepRequest(request_id=new_id(), denominator=1.0, learning_rate=5e-3)
            done = (await self.stub.OptimStep(step, **CALL)).step
        return done

    async def publish(self, request_id: str = "") -> pb.PublishWeightsResponse:
        request = pb.PublishWeightsRequest(request_id=request_id or new_id(), slot="policy")
        return await self.stub.PublishWeights(request, **CALL)

    async def apply(self, version: int) -> None:
        """Until the engine serves a version."""
        async with asyncio.timeout(60):
            while True:
                if (await self.engine.GetLoad(engine_pb.GetLoadRequest(), **CALL)).weight_version >= version:
                    return
                await asyncio.sleep(0.05)

    async def next_token(self, version: int) -> tuple[int, float]:
        """The most probable token after the prompt by exactly this version, and its log-probability."""
        await self.apply(version)
        message = generation_pb2.GenerationInput(
            request_id=new_id(), run_id=RUN, prompt_token_ids=arrays.to_wire(np.array(PROMPT, np.int32)), seeds=[1],
            sampling=generation_pb2.SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True),
            gate=generation_pb2.VersionGate(exact_version=version),
        )  # fmt: skip
        async for response in self.engine.Generate(engine_pb.GenerateRequest(input=message), timeout=30):
            output = response.output
            assert [span.weight_version for span in output.version_spans] == [version]
            logprobs = arrays.from_wire(output.sampler_logprobs, "sampler_logprobs")
            return int(arrays.from_wire(output.token_ids, "token_ids")[0]), float(logprobs[0])
        raise AssertionError("no output")

    async def logprob(self, target: int) -> float:
        datum = pb.Datum(token_ids=arrays.to_wire(np.array([*PROMPT, target], np.int32)), temperature=1.0)
        response = await self.stub.Forward(pb.ForwardRequest(data=[datum]), **CALL)
        return float(arrays.from_wire(response.policy_logprobs[0], "policy_logprobs")[-1])


@asynccontextmanager
async def notebook(folder: Path, redis_url: str) -> AsyncIterator[Notebook]:
    """A coordinator and a trainer, ready."""
    run_file = folder / "run.toml"
    run_file.write_text(RUN_FILE.format(directory=folder / "run"))
    async with (
        service_process("coordinator", run_file, redis_url=redis_url) as (_, coordinator),
        service_process("trainer", run_file, coordinator=coordinator) as (trainer, address),
        open_channel(coordinator) as one, open_channel(address) as two,
    ):  # fmt: skip
        await wait_for_state(address, "READY")
        yield Notebook(
            trainer,
            pb_grpc.TrainerServiceStub(two),
            coordinator_grpc.CoordinatorServiceStub(one),
            run_file,
            coordinator,
        )


@asynccontextmanager
async def sampling(client: Notebook) -> AsyncIterator[None]:
    """An embedded engine beside it."""
    async with service_process("engine", client.run_file, coordinator=client.address) as (_, address):
        async with open_channel(address) as channel:
            client.engine = engine_grpc.EngineServiceStub(channel)
            yield


async def test_a_client_trains_publishes_samples_saves_and_loads(
    tmp_path: Path, redis_url: str, redis_client: Any
) -> None:
    async with notebook(tmp_path, redis_url) as client, sampling(client):
        before, _ = await client.next_token(1)
        target = 9 if before != 9 else 8
        steps = await client.train(target, 8)
        assert steps == 8
        published = await client.publish("first")
        assert (published.weight_version, published.step, len(published.digest)) == (2, 8, 64)
        assert await client.publish("first") == published, "a repeat publishes nothing"
        assert (await client.publish()).weight_version == 2, "nor do equal weights"
        token, logprob = await client.next_token(2)
        assert token == target and logprob == pytest.approx(await client.logprob(target), abs=1e-4)

        save = pb.SaveCheckpointRequest(request_id=new_id(), name="mine")
        await client.stub.SaveCheckpoint(save, **CALL)
        await client.train(before, 12)
        other = await client.publish()
        assert other.weight_version == 3 and (await client.next_token(3))[0] == before
        loaded = await client.stub.LoadCheckpoint(pb.LoadCheckpointRequest(request_id=new_id(), name="mine"), **CALL)
        assert loaded.step == 8
        again = await client.publish()
        assert (again.weight_version, again.digest) == (4, published.digest)
        assert (await client.next_token(4))[0] == target


async def test_a_restarted_trainer_publishes_nothing_by_itself_and_goes_on_from_what_was_saved(
    tmp_path: Path, redis_url: str, redis_client: Any
) -> None:
    async with notebook(tmp_path, redis_url) as client:
        await client.train(9, 2)
        assert (await client.publish()).weight_version == 2
        await client.stub.SaveCheckpoint(pb.SaveCheckpointRequest(request_id=new_id(), name="mine"), **CALL)
        await client.trainer.restart()
        await wait_for_state(client.trainer.address, "READY")
        assert "go on by LoadCheckpoint" in client.trainer.log()
        newest = await client.coordinator.GetVersion(coordinator_pb.GetVersionRequest(run_id=RUN), **CALL)
        assert newest.version.weight_version == 2
        await client.stub.LoadCheckpoint(pb.LoadCheckpointRequest(request_id=new_id(), name="mine"), **CALL)
        assert await client.train(9, 1) == 3
        assert (await client.publish()).weight_version == 3
        end = coordinator_pb.FinishRunRequest(
            request_id=new_id(), run_id=RUN, state=coordinator_pb.RUN_STATE_STOPPED, reason="enough"
        )
        await client.coordinator.FinishRun(end, **CALL)
        assert await client.trainer.wait(60) == 0, client.trainer.log()
