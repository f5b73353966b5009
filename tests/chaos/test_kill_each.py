"""Kill -9 of every process of one run, in turn: it ends as if nothing had happened, bit for bit."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.cli.observe import Observer
from paceline.config import RunFile, load_run_file
from paceline.launcher.launcher import Launcher
from paceline.ledger import Account, Ledger

STEPS = 12
VICTIMS = [
    "trainer-0",
    "engine-0",
    "rollout-0",
    "router-0",
    "reward-0",
    "coordinator-0",
    "redis",
    "dashboard-0",
    "gateway-0",
]
OVERRIDES = [
    f"run.steps={STEPS}", "rollout.groups_per_step=4", "rollout.samples_per_group=4", "rollout.lease_seconds=5",
    "trainer.checkpoint_every=3", "evaluation=[]",
]  # fmt: skip


def configuration(directory: Path, *overrides: str) -> RunFile:
    everything = [*OVERRIDES, f"run.directory={directory}", *overrides]
    return load_run_file(Path("examples/sort4/run.toml"), everything)


async def complete(config: RunFile, victims: list[str]) -> tuple[Account, dict[int, pb.StepRecord], Launcher]:
    """Run to the end, killing one victim after each recorded step."""
    config.directory.mkdir(parents=True)
    news: asyncio.Queue[str] = asyncio.Queue()
    launcher = Launcher(config, news.put_nowait)
    try:
        await launcher.start()
        observer = Observer(launcher.addresses["coordinator-0"], config.run.name)
        killer = asyncio.create_task(kill_in_turn(launcher, observer, list(victims), news))
        async with asyncio.timeout(200):
            assert await launcher.watch(), launcher.failure
            records = await all_records(observer, config.run.steps)
        killer.cancel()
        await asyncio.gather(killer, return_exceptions=True)
        await observer.close()
        client = redis.asyncio.Redis.from_url(launcher.redis_url)
        account = await Ledger(client, config.run.name).account(recount=True)
        await client.aclose()
        return account, records, launcher
    finally:
        await launcher.stop()


async def kill_in_turn(launcher: Launcher, observer: Observer, victims: list[str], news: asyncio.Queue[str]) -> None:
    """One victim a new step, each after the one before has come back."""
    highest = 0
    async for record in observer.follow_steps():
        if record.step <= highest or not victims:
            continue
        highest = record.step
        victim = victims.pop(0)
        pid = launcher.children[victim].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        while await news.get() != f"{victim} is back":
            pass


async def all_records(observer: Observer, steps: int) -> dict[int, pb.StepRecord]:
    """The records, once the coordinator has sent the last of an ended run."""
    async for _ in observer.follow_steps():
        pass
    assert sorted(observer.view.records) == list(range(1, steps + 1))
    return observer.view.records


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, pb.StepRecord]]]:
    directory = tmp_path_factory.mktemp("runs") / "calm"
    account, records, _ = asyncio.run(complete(configuration(directory), []))
    assert account.balanced and account.trained == STEPS * 4
    yield directory, records


@pytest.mark.timeout(400)
def test_kill_every_process_in_turn(undisturbed: tuple[Path, dict[int, pb.StepRecord]], tmp_path: Path) -> None:
    calm, calm_records = undisturbed
    directory = tmp_path / "disturbed"
    account, records, launcher = asyncio.run(complete(configuration(directory), VICTIMS))

    killed = {name for name, child in launcher.children.items() if child.restarts}
    assert killed == set(VICTIMS)
    assert account.balanced, account
    assert (account.trained, account.dead, account.in_flight, account.dropped) == (STEPS * 4, 0, 0, {})

    trained = [group for step in sorted(records) for group in records[step].group_ids]
    assert sorted(trained) == sorted(set(trained)), "a prompt was trained twice"
    assert len(trained) == STEPS * 4
    assert {step: list(record.group_ids) for step, record in records.items()} == {
        step: list(record.group_ids) for step, record in calm_records.items()
    }
    versions = [records[step].weight_version for step in sorted(records)]
    assert versions == sorted(set(versions)), f"versions must only go up: {versions}"
    for step, record in records.items():
        assert record.values["loss"] == calm_records[step].values["loss"], f"loss of step {step} differs"
        assert record.values["staleness_max"] == 0
    weights = "export/model.safetensors"
    assert (directory / weights).read_bytes() == (calm / weights).read_bytes()
