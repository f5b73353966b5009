"""The commands in examples/attach/README.md, word for word but for the ports: a second engine joins, both serve."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.rollout.v1 import rollout_service_pb2 as rollout_pb
from paceline.api.rollout.v1 import rollout_service_pb2_grpc as rollout_grpc
from paceline.api.router.v1 import router_service_pb2 as router_pb
from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.rpc.client import open_channel

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "examples/attach/README.md").read_text()
RUN_FILE = "examples/attach/run.toml"
STEPS = 8


def commands(info: str) -> list[str]:
    """The lines of the fenced block that is marked so."""
    block = re.search(rf"^```sh {info}\n(.*?)^```", README, re.DOTALL | re.MULTILINE)
    assert block is not None, f"the README has no block {info}"
    return block[1].strip().splitlines()


def with_free_ports(lines: list[str], chosen: dict[str, int]) -> list[str]:
    """Replace the ports 7000 to 7099 by free ones, each by the same one in all lines."""

    def replace(match: re.Match[str]) -> str:
        if match[0] not in chosen:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                chosen[match[0]] = probe.getsockname()[1]
        return str(chosen[match[0]])

    return [re.sub(r"\b70\d\d\b", replace, line) for line in lines]


@asynccontextmanager
async def running(lines: list[str], folder: Path) -> AsyncIterator[list[asyncio.subprocess.Process]]:
    """The commands in a shell each, in `folder`; ended at the end of the block, the first one last."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    guard = f"{sys.executable} -m paceline.launcher.guard {os.getpid()}"
    processes = []
    try:
        for number, line in enumerate(lines):
            log = (folder / f"{len(lines)}-{number}.log").open("wb")
            processes.append(
                await asyncio.create_subprocess_exec(
                    "bash", "-c", f"exec {guard} {line}", cwd=folder, env=environment, stdout=log, stderr=log
                )
            )
            log.close()
        yield processes
    finally:
        for process in reversed(processes):
            if process.returncode is None:
                process.send_signal(signal.SIGTERM)
                try:
                    async with asyncio.timeout(15):
                        await process.wait()
                except TimeoutError:
                    process.kill()
                    await process.wait()


async def engines(channel: grpc.aio.Channel) -> dict[str, router_pb.EngineEntry]:
    stub: Any = router_grpc.RouterServiceStub(channel)
    listed = await stub.ListEngines(router_pb.ListEnginesRequest(), timeout=10, wait_for_ready=True)
    return {item.engine_id: item for item in listed.engines}


async def recorded(channel: grpc.aio.Channel, step: int) -> None:
    """Return once the step is recorded."""
    stub: Any = pb_grpc.CoordinatorServiceStub(channel)
    async for note in stub.WatchSteps(pb.WatchStepsRequest(run_id="attach"), timeout=150, wait_for_ready=True):
        if note.record.step >= step:
            return


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The repository as the commands see it, with a shorter run."""
    for name in ("tests", "services", "src"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "examples/attach").mkdir(parents=True)
    (tmp_path / "examples/sort4").symlink_to(ROOT / "examples/sort4")
    text = (ROOT / RUN_FILE).read_text()
    short = re.sub(r"steps = 150", f"steps = {STEPS}", text)
    assert short != text
    transport = '[weights]\ntransport = { name = "disk" }\n'
    (tmp_path / RUN_FILE).write_text(f"{short}\n{transport}")
    return tmp_path


@pytest.mark.timeout(220)
async def test_the_commands_of_the_readme_train_with_an_engine_that_joins_on_the_way(folder: Path) -> None:
    ports: dict[str, int] = {}
    lines = with_free_ports(commands("services"), ports)
    joining = with_free_ports(commands("join"), ports)
    async with asyncio.timeout(200), running(lines, folder) as processes:
        coordinator, router, rollout = (open_channel(f"127.0.0.1:{ports[port]}") for port in ("7001", "7004", "7005"))
        await recorded(coordinator, 1)
        production: Any = rollout_grpc.RolloutServiceStub(rollout)
        # Held while the engine loads, so that on any machine enough of the run is left for it.
        await production.PauseProduction(rollout_pb.PauseProductionRequest(reason="an engine joins"), timeout=10)
        async with running(joining, folder):
            while "engine-1" not in (found := await engines(router)) or found["engine-1"].excluded_reason:  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # a poll on the table, under the test's deadline
            await production.ResumeProduction(rollout_pb.ResumeProductionRequest(), timeout=10)
            trainer = processes[-1]
            assert await trainer.wait() == 0
            found = await engines(router)
        assert set(found) == {"engine-0", "engine-1"}
        assert all(item.num_requests > 0 for item in found.values()), found
        stub: Any = pb_grpc.CoordinatorServiceStub(coordinator)
        run = (await stub.GetRun(pb.GetRunRequest(run_id="attach"), timeout=10)).run
        assert (run.state, run.last_step) == (pb.RUN_STATE_FINISHED, STEPS)
        assert (folder / "runs/attach/export/model.safetensors").is_file()
        for channel in (coordinator, router, rollout):
            await channel.close()
