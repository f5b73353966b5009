"""A trainer whose disk is full waits and says so; with room again it ends as if nothing had been."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis.asyncio
from trainer_run import END_SECONDS, GROUPS, STEPS, start_run

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb

pytestmark = pytest.mark.timeout(300)


class SmallDisk:
    """A file system of a few MB, full but for some KB until `free`."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.mounted: list[Path] = []

    def mount(self, directory: Path) -> None:
        path = directory / self.name
        path.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", path], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small disk here: {done.stderr.strip()}")
        self.mounted.append(path)
        with (path / "filler").open("wb") as file:
            file.write(bytes(12 * 2**20 - 64 * 2**10))

    def free(self) -> None:
        (self.mounted[0] / "filler").unlink()


@pytest.fixture(params=["checkpoints", "weights"])
def disk(request: pytest.FixtureRequest) -> Iterator[SmallDisk]:
    small = SmallDisk(request.param)
    yield small
    for path in small.mounted:
        subprocess.run(["umount", path], check=True)


async def test_a_full_disk_is_waited_out_and_named(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis, disk: SmallDisk
) -> None:
    async with start_run(tmp_path, redis_url, redis_client, before=disk.mount) as run:
        what = "the checkpoint of step 1" if disk.name == "checkpoints" else "weight version 1"
        cause = await run.wait_for_cause(f"room on the disk for {what}")
        assert "No space left on device" in cause and str(disk.mounted[0]) in cause
        assert [path.name for path in disk.mounted[0].iterdir() if not path.name.startswith(".")] == ["filler"]
        assert run.trainer.returncode is None and await run.state() == pb.RUN_STATE_ACTIVE
        disk.free()
        assert await run.trainer.wait(END_SECONDS) == 0, run.trainer.log()
        account = await run.ledger.account(recount=True)
        assert account.balanced and account.committed == STEPS * GROUPS
        assert [line["step"] for line in run.metrics()] == list(range(1, STEPS + 1))
        assert [step for _, step in run.rollout.versions] == list(range(STEPS + 1))
        assert "Free some space" in run.trainer.log()
