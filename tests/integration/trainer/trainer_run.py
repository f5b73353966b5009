"""A run of the real trainer, with a real coordinator and Redis, and a scripted rollout."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio
from scripted_rollout import ScriptedRollout

from paceline.api.common.v1 import status_service_pb2 as status_pb2
from paceline.api.common.v1 import status_service_pb2_grpc as status_grpc
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.ids import new_id
from paceline.ledger import Ledger
from paceline.rpc.client import open_channel
from paceline.testing.processes import ServiceProcess, service_process

CALL = {"timeout": 20.0, "wait_for_ready": True}
STEPS, GROUPS = 4, 2
MODEL = Path(__file__).parents[2] / "assets" / "sort4"
END_SECONDS = 150.0
_numbers = itertools.count()


@dataclass
class Run:
    """A run with its processes."""

    trainer: ServiceProcess
    coordinator: ServiceProcess
    stub: Any
    rollout: ScriptedRollout
    ledger: Ledger
    directory: Path
    run_id: str
    task: asyncio.Task[None] | None = None

    def start_rollout(self) -> None:
        """Start, or after Redis was lost start again, what stands for rollout."""
        self.task = asyncio.create_task(self.rollout.run())

    async def stop_rollout(self) -> None:
        if self.task is not None:
            self.task.cancel()
            await asyncio.gather(self.task, return_exceptions=True)

    async def records(self) -> dict[int, pb.StepRecord]:
        """Stored records by step."""
        found: dict[int, pb.StepRecord] = {}
        async for response in self.stub.WatchSteps(pb.WatchStepsRequest(run_id=self.run_id), timeout=20.0):
            if response.HasField("record"):
                found[response.record.step] = response.record
            if response.HasField("run"):
                break
        return found

    async def wait_for_step(self, step: int) -> None:
        """Until the record of a step is there."""
        request = pb.WatchStepsRequest(run_id=self.run_id, start_step=step)
        async for response in self.stub.WatchSteps(request, timeout=END_SECONDS):
            if response.HasField("record") and response.record.step >= step:
                return

    async def waits(self) -> list[str]:
        """For what the trainer waits now."""
        async with open_channel(self.trainer.address) as channel:
            stub: Any = status_grpc.StatusServiceStub(channel)
            status = await stub.GetStatus(status_pb2.GetStatusRequest(), **CALL)
        return [part.waiting_for for part in status.activities if part.waiting_for]

    async def wait_for_cause(self, words: str) -> str:
        """Until the trainer's status says that it waits for this."""
        async with asyncio.timeout(END_SECONDS):
            while True:
                for cause in await self.waits():
                    if words in cause:
                        return cause
                await asyncio.sleep(0.1)

    async def state(self) -> int:
        return (await self.stub.GetRun(pb.GetRunRequest(run_id=self.run_id), **CALL)).run.state

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]


@asynccontextmanager
async def start_run(
    folder: Path, redis_url: str, client: redis.asyncio.Redis, *overrides: str, steps: int = STEPS,
    before: Callable[[Path], None] = lambda _: None,
) -> AsyncIterator[Run]:  # fmt: skip
    """A run whose trainer has started. `before` may change the run's folder first."""
    run_id = f"training-{next(_numbers)}"
    directory = folder / run_id
    directory.mkdir()
    before(directory)
    run_file = directory / "run.toml"
    run_file.write_text(
        f"""
        [run]
        name = "{run_id}"
        directory = "{directory}"
        steps = {steps}
        [model]
        path = "{MODEL}"
        [data]
        source = {{name = "jsonl", path = "data.jsonl"}}
        [rollout]
        groups_per_step = {GROUPS}
        [weights]
        transport = {{name = "disk"}}
        [[reward.graders]]
        name = "exact_match"
        [trainer.optimizer]
        learning_rate = 1e-3
        """
    )
    async with service_process("coordinator", run_file, redis_url=redis_url) as (coordinator, address):
        channel = open_channel(address)
        stub = pb_grpc.CoordinatorServiceStub(channel)
        request = pb.CreateRunRequest(request_id=new_id(), run_id=run_id, config_digest="d", num_steps=steps)
        await stub.CreateRun(request, **CALL)
        rollout = ScriptedRollout(client, stub, run_id, GROUPS, steps)
        async with service_process(
            "trainer", run_file, redis_url=redis_url, coordinator=address, overrides=overrides
        ) as (trainer, _):  # fmt: skip
            run = Run(trainer, coordinator, stub, rollout, Ledger(client, run_id), directory, run_id)
            run.start_rollout()
            try:
                yield run
            finally:
                await run.stop_rollout()
        await channel.close()


def exported(run: Run) -> bytes:
    return (run.directory / "export" / "model.safetensors").read_bytes()


async def wait_for_state(address: str, state: str) -> None:
    """Until the process at this address says that it is in this state."""
    async with asyncio.timeout(END_SECONDS), open_channel(address) as channel:
        stub: Any = status_grpc.StatusServiceStub(channel)
        while True:
            if (await stub.GetStatus(status_pb2.GetStatusRequest(), **CALL)).state == state:
                return
            await asyncio.sleep(0.05)
