"""Router, coordinator and engines as processes: the table comes from the coordinator alone, over kill -9 of each."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.api.router.v1 import router_service_pb2 as pb
from paceline.api.router.v1 import router_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.ids import new_id
from paceline.rpc.client import open_channel
from paceline.testing.processes import ServiceProcess, service_process
from paceline.testing.scripted_engine import hashed

RUN_FILE = """
[run]
name = "routed"
[model]
path = "tests/assets/sort4"
[data]
source = {name = "jsonl", path = "data.jsonl"}
[[reward.graders]]
name = "exact_match"
[router]
probe_every_seconds = 0.2
probe_timeout_seconds = 2.0
[telemetry]
enabled = false
"""
ENGINE = "paceline.testing.scripted_engine"
CALL: dict[str, Any] = {"timeout": 20.0, "wait_for_ready": True}


@dataclass
class Run:
    """A run of processes, and stubs of coordinator and router."""

    run_file: Path
    redis_url: str
    coordinator: ServiceProcess
    router: ServiceProcess
    control: Any
    generate_stub: Any

    def engine(self, member_id: str, *flags: str) -> Any:
        """A scripted engine process that joins the run."""
        return service_process(
            ENGINE, self.run_file, "--member-id", member_id, *flags, coordinator=self.coordinator.address
        )

    async def publish(self, digest: str) -> int:
        """Publish weights as the trainer would, and return their number."""
        acquire = coordinator_pb.AcquireTrainerRequest(request_id=new_id(), run_id="routed", incarnation=digest)
        fence = (await self.control.AcquireTrainer(acquire, **CALL)).fence
        prepare = coordinator_pb.PrepareVersionRequest(
            request_id=new_id(), run_id="routed", fence=fence, digest=digest, kind=weights_pb2.WEIGHT_KIND_FULL,
            transport="disk",
        )  # fmt: skip
        number = (await self.control.PrepareVersion(prepare, **CALL)).version.weight_version
        commit = coordinator_pb.CommitVersionRequest(
            request_id=new_id(), run_id="routed", fence=fence, weight_version=number, uri="/nowhere", num_bytes=1
        )
        return (await self.control.CommitVersion(commit, **CALL)).version.weight_version

    async def table(self) -> dict[str, str]:
        """Why each engine takes no requests; empty text where it does."""
        listed = await self.generate_stub.ListEngines(pb.ListEnginesRequest(), **CALL)
        return {item.engine_id: item.excluded_reason for item in listed.engines}

    async def until(self, **expected: str) -> None:
        """Wait until the table is this; keys have _ for -. A text is contained, an empty one is equal."""
        wanted = {name.replace("_", "-"): text for name, text in expected.items()}
        async with asyncio.timeout(20):
            while True:
                table = await self.table()
                if table.keys() == wanted.keys() and all(_says(table[name], text) for name, text in wanted.items()):
                    return
                await asyncio.sleep(0.05)

    async def generate(self, seeds: list[int], **fields: Any) -> dict[int, tuple[list[int], set[int]]]:
        """Tokens and versions of each sample."""
        prompt = arrays.to_wire(np.array([1, 2, 3], np.int32))
        sampling = generation_pb.SamplingParams(temperature=1.0, max_new_tokens=64)
        values: dict[str, Any] = {"request_id": new_id(), "run_id": "routed", "seeds": seeds, "sampling": sampling}
        request = pb.GenerateRequest(
            input=generation_pb.GenerationInput(prompt_token_ids=prompt, **(values | fields))
        )  # fmt: skip
        found: dict[int, tuple[list[int], set[int]]] = {}
        finished: list[int] = []
        async for message in self.generate_stub.Generate(request, **CALL):
            output = message.output
            tokens, versions = found.setdefault(output.index, ([], set()))
            tokens += arrays.from_wire(output.token_ids, "token_ids").tolist()
            versions.update(span.weight_version for span in output.version_spans)
            if output.HasField("finish"):
                assert output.finish.reason == generation_pb.FINISH_REASON_STOP
                finished.append(output.index)
        assert sorted(finished) == list(range(len(seeds)))
        return found


def _says(reason: str, text: str) -> bool:
    return text in reason and bool(text) == bool(reason)


@pytest.fixture
async def run(tmp_path: Path, redis_url: str, redis_client: Any) -> AsyncIterator[Run]:
    """A coordinator and a router over an empty store."""
    run_file = tmp_path / "run.toml"
    run_file.write_text(RUN_FILE)
    async with service_process("coordinator", run_file, redis_url=redis_url) as (coordinator, address):
        async with service_process("router", run_file, coordinator=address) as (router, router_address):
            channels: list[grpc.aio.Channel] = [open_channel(address), open_channel(router_address)]
            yield Run(
                run_file, redis_url, coordinator, router, coordinator_grpc.CoordinatorServiceStub(channels[0]),
                pb_grpc.RouterServiceStub(channels[1]),
            )  # fmt: skip
            for channel in channels:
                await channel.close()


async def test_the_table_survives_kills_of_router_and_coordinator(run: Run) -> None:
    first = await run.publish("a")
    async with run.engine("engine-0"), run.engine("engine-1"):
        await run.until(engine_0="", engine_1="")
        assert (await run.generate([7]))[0] == (hashed()([1, 2, 3], 7, first), {first})
        await run.router.restart()
        await run.until(engine_0="", engine_1="")
        await run.coordinator.restart()
        second = await run.publish("b")
        gate = generation_pb.VersionGate(min_version=second)
        assert (await run.generate([7], gate=gate))[0] == (hashed()([1, 2, 3], 7, second), {second})


async def test_a_recovered_engine_waits_for_published_weights(run: Run) -> None:
    """Case A03 with processes: engine-b is killed and comes back with weights that nobody published."""
    version = await run.publish("a")
    async with run.engine("engine-a"):
        async with run.engine("engine-b") as (process, _):
            await run.until(engine_a="", engine_b="")
            await process.kill()
        async with run.engine("engine-b", "--no-follow", "--weight-version", "99"):
            await run.until(engine_a="", engine_b="99, which the coordinator does not know")
            for seed in range(20):
                assert (await run.generate([seed]))[0][1] == {version}
        async with run.engine("engine-b"):
            await run.until(engine_a="", engine_b="")


async def test_a_killed_engine_loses_no_sample(run: Run) -> None:
    version = await run.publish("a")
    slow = ("--length", "20", "--token-seconds", "0.01")
    async with run.engine("engine-0", *slow, "--fault", "die_midstream=60"), run.engine("engine-1", *slow):
        await run.until(engine_0="", engine_1="")
        asked = [run.generate(list(range(10 * number, 10 * number + 4)), stream=number % 2 == 0) for number in range(6)]
        for number, found in enumerate(await asyncio.gather(*asked)):
            for index in range(4):
                assert found[index] == (hashed(20)([1, 2, 3], 10 * number + index, version), {version})
        await run.until(engine_0="is unhealthy", engine_1="")
