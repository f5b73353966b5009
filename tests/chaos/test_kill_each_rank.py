"""Kill -9 of each rank of a sharded trainer in turn: the run ends as it would have, and no process is left over."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
import redis.asyncio

from paceline.cli.observe import Observer
from paceline.config import RunFile, load_run_file
from paceline.launcher.launcher import Launcher
from paceline.ledger import Account, Ledger

STEPS = 5
OVERRIDES = [
    f"run.steps={STEPS}", "rollout.groups_per_step=4", "rollout.samples_per_group=4", "rollout.lease_seconds=5",
    "trainer.checkpoint_every=2", "evaluation=[]", "trainer.backend=fsdp", "trainer.parallel.ranks=2",
    "trainer.parallel.shard=2", "trainer.async_checkpoints=true", "gateway.enabled=false", "dashboard.enabled=false",
]  # fmt: skip


def configuration(directory: Path) -> RunFile:
    return load_run_file(Path("examples/sort4/run.toml"), [*OVERRIDES, f"run.directory={directory}"])


def ranks_of(pid: int) -> list[int]:
    """The process and its children: rank 0 and the others."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *map(int, children)]


async def complete(config: RunFile, victims: list[int]) -> tuple[Account, Observer, set[int], int]:
    """Run to the end; after each new step kill the next victim, a number of a rank, and wait for the trainer's return.

    Ids of all trainer processes ever seen and the number of restarts come back too.
    """
    config.directory.mkdir(parents=True)
    news: asyncio.Queue[str] = asyncio.Queue()
    launcher = Launcher(config, news.put_nowait)
    seen: set[int] = set()

    async def kill(observer: Observer) -> None:
        highest = 0
        async for record in observer.follow_steps():
            pid = launcher.children["trainer-0"].pid
            if record.step <= highest or pid is None:
                continue
            highest = record.step
            ranks = ranks_of(pid)
            assert len(ranks) == 2
            seen.update(ranks)
            if victims:
                os.kill(ranks[victims.pop(0)], signal.SIGKILL)
                while await news.get() != "trainer-0 is back":
                    pass

    try:
        await launcher.start()
        observer = Observer(launcher.addresses["coordinator-0"], config.run.name)
        killer = asyncio.create_task(kill(observer))
        async with asyncio.timeout(240):
            assert await launcher.watch(), launcher.failure
            await killer
        await observer.close()
        client = redis.asyncio.Redis.from_url(launcher.redis_url)
        account = await Ledger(client, config.run.name).account(recount=True)
        await client.aclose()
        return account, observer, seen, launcher.children["trainer-0"].restarts
    finally:
        await launcher.stop()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_kill_each_rank_in_turn(tmp_path: Path) -> None:
    account, calm, _, restarts = asyncio.run(complete(configuration(tmp_path / "calm"), []))
    assert account.balanced and account.trained == STEPS * 4 and restarts == 0
    account, disturbed, seen, restarts = asyncio.run(complete(configuration(tmp_path / "disturbed"), [1, 0]))
    assert restarts == 2 and len(seen) == 6
    assert account.balanced, account
    assert (account.trained, account.dead, account.in_flight, account.dropped) == (STEPS * 4, 0, 0, {})
    assert not [pid for pid in seen if Path(f"/proc/{pid}").exists()], "a rank outlived its trainer"
    log = (tmp_path / "disturbed" / "logs" / "trainer-0.log").read_text()
    assert "rank 1 was killed by signal 9" in log
    for step, record in disturbed.view.records.items():
        assert list(record.group_ids) == list(calm.view.records[step].group_ids)
        assert record.values["loss"] == calm.view.records[step].values["loss"], f"loss of step {step} differs"
    weights = "export/model.safetensors"
    assert (tmp_path / "disturbed" / weights).read_bytes() == (tmp_path / "calm" / weights).read_bytes()
