"""No space at any write: what is there stays whole, the wait is named, and with room the same content arrives."""

from __future__ import annotations

import asyncio
import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from paceline.rpc import errors
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.disk import Disk
from services.trainer.room import is_full, until_room, with_room
from services.trainer.run.metrics import MetricsFile


class FullDisk(Disk):
    """Has no room at the n-th change and from then on, until it is `freed`. A write leaves half of the file."""

    def __init__(self, changes: int) -> None:
        self.left = changes
        self.freed = False

    def _check(self, path: Path) -> None:
        self.left -= 1
        if self.left < 0 and not self.freed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def make_directory(self, path: Path) -> None:
        self._check(path)
        super().make_directory(path)

    def write(self, path: Path, data: bytes) -> None:
        path.write_bytes(data[: len(data) // 2])
        self._check(path)
        super().write(path, data)

    def rename(self, source: Path, target: Path) -> None:
        self._check(target)
        super().rename(source, target)

    def sync_directory(self, path: Path) -> None:
        self._check(path)
        super().sync_directory(path)


PARTS = {"ledger.json": b"{}", "progress.json": b"[" + b"1," * 4000 + b"1]"}


def write(store: CheckpointStore, step: int) -> Checkpoint:
    store.stage(f"step-{step:06d}")
    return store.publish_step(step, step + 1, PARTS, {"record": {"step": step}})


@pytest.mark.parametrize("changes", range(12))
async def test_no_room_at_any_write_is_waited_out(tmp_path: Path, changes: int) -> None:
    write(CheckpointStore(tmp_path, 2), 1)
    disk = FullDisk(changes)
    store = CheckpointStore(tmp_path, 2, disk)
    causes: list[str] = []

    @contextmanager
    def waiting(cause: str) -> Iterator[None]:
        causes.append(cause)
        left = CheckpointStore(tmp_path, 2).newest()
        assert left is not None and left.step in (1, 2), "an earlier one is whole"
        disk.freed = len(causes) == 2
        yield

    made = await until_room(lambda: asyncio.to_thread(write, store, 2), "the checkpoint of step 2", waiting, pause=0.0)
    found = CheckpointStore(tmp_path, 2).newest()
    assert found is not None and (found.step, found.digest) == (2, made.digest)
    assert {name: found.file(name).read_bytes() for name in PARTS} == PARTS
    assert os.readlink(tmp_path / "latest") == "step-000002"
    assert len(causes) in (0, 2) and (changes > 3 or causes)
    for cause in causes:
        assert cause.startswith("room on the disk for the checkpoint of step 2: ") and "No space left" in cause


async def test_other_failures_are_not_waited_out(tmp_path: Path) -> None:
    async def broken() -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    @contextmanager
    def waiting(cause: str) -> Iterator[None]:
        raise AssertionError(cause)
        yield

    with pytest.raises(PermissionError):
        await until_room(broken, "a checkpoint", waiting)
    with pytest.raises(PermissionError):
        await with_room(broken, "a checkpoint")


async def test_a_client_is_told_to_make_room() -> None:
    async def full() -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT), "/data/mine")

    with pytest.raises(errors.ResourceExhausted, match=r"no room on the disk for checkpoint 'mine': .*quota"):
        await with_room(full, "checkpoint 'mine'")


def test_native_writers_say_it_in_words() -> None:
    assert is_full(RuntimeError("I/O error: No space left on device (os error 28)"))
    assert not is_full(RuntimeError("shape mismatch"))


def test_a_record_that_did_not_fit_leaves_no_half_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.rewind(0)
    metrics.append({"step": 1, "loss": 0.5})
    opened = Path.open

    def half(self: Path, *arguments: object, **more: object) -> object:
        file = opened(self, *arguments, **more)  # type: ignore[arg-type]

        class Half:
            """The first half fits."""

            def __enter__(self) -> Half:
                return self

            def __exit__(self, *_: object) -> None:
                file.close()

            def __getattr__(self, name: str) -> object:
                return getattr(file, name)

            def write(self, data: bytes) -> int:
                return file.write(data[: len(data) // 2])  # type: ignore[arg-type]

        return Half()

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", half)
        with pytest.raises(OSError, match="No space left"):
            metrics.append({"step": 2, "loss": 0.25})
    metrics.append({"step": 2, "loss": 0.25})
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]
