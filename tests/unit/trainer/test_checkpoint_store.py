"""Checkpoints on disk: whatever write is interrupted, one that loads is left; a torn one is named and skipped."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from paceline.rpc import errors
from services.trainer.checkpoint import CheckpointStore, step_name
from services.trainer.disk import Disk
from services.trainer.run.metrics import MetricsFile


class Killed(BaseException):
    """Stands for kill -9: nothing may catch it and go on."""


class DyingDisk(Disk):
    """Dies at the n-th change; a write that dies leaves half of the file."""

    def __init__(self, changes: int) -> None:
        self.left = changes

    def _count(self) -> bool:
        self.left -= 1
        return self.left < 0

    def make_directory(self, path: Path) -> None:
        if self._count():
            raise Killed
        super().make_directory(path)

    def write(self, path: Path, data: bytes) -> None:
        if self._count():
            path.write_bytes(data[: len(data) // 2])
            raise Killed
        super().write(path, data)

    def sync_file(self, path: Path) -> None:
        if self._count():
            raise Killed
        super().sync_file(path)

    def rename(self, source: Path, target: Path) -> None:
        if self._count():
            raise Killed
        super().rename(source, target)

    def remove(self, path: Path) -> None:
        if self._count():
            raise Killed
        hidden = path.with_name(f".removed-{path.name}")
        os.rename(path, hidden)
        if self._count():
            raise Killed
        os.rename(hidden, path)
        super().remove(path)

    def sync_directory(self, path: Path) -> None:
        if self._count():
            raise Killed
        super().sync_directory(path)


RANK = "parameters/rank-00001.safetensors"


def parts(step: int) -> dict[str, bytes]:
    return {RANK: bytes([step]) * 4000, "optimizer.safetensors": b"m" * step, "ledger.json": b"{}"}


def write(root: Path, step: int, disk: Disk | None = None) -> None:
    """As a step does it: the ranks fill the stage, the store adds the ledger."""
    store = CheckpointStore(root, 2, disk)
    stage = store.stage(step_name(step))
    (disk or Disk()).make_directory(stage / "parameters")
    for name in (RANK, "optimizer.safetensors"):
        (disk or Disk()).write(stage / name, parts(step)[name])
    store.publish_step(step, step + 1, {"ledger.json": b"{}"}, {"record": {"step": step}})


def test_round_trip(tmp_path: Path) -> None:
    write(tmp_path, 12)
    found = CheckpointStore(tmp_path, 2).newest()
    assert found is not None
    assert (found.step, found.weight_version, found.meta["record"]) == (12, 13, {"step": 12})
    assert {name: found.file(name).read_bytes() for name in parts(12)} == parts(12)
    assert os.readlink(tmp_path / "latest") == "step-000012"


def test_kill_at_every_write_leaves_one_that_loads(tmp_path: Path) -> None:
    reached_end = False
    for changes in range(60):
        root = tmp_path / str(changes)
        write(root, 1)
        write(root, 2)
        disk = DyingDisk(changes)
        try:
            write(root, 3, disk)
            reached_end = True
        except Killed:
            pass
        store = CheckpointStore(root, 2)
        found = store.newest()
        assert found is not None and found.step in (2, 3), changes
        assert found.file(RANK).read_bytes() == parts(found.step)[RANK]
        assert store.open(os.readlink(root / "latest")).step in (2, 3)
        write(root, 3)
        again = store.newest()
        assert again is not None and again.step == 3
        assert sorted(path.name for path in root.glob("step-*")) == ["step-000002", "step-000003"]
        if reached_end:
            break
    assert reached_end and changes > 8


@pytest.mark.parametrize("part", [RANK, "manifest.json", "ledger.json"])
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_torn_one_is_named_and_skipped(tmp_path: Path, part: str, how: str, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, 1)
    write(tmp_path, 2)
    path = tmp_path / "step-000002" / part
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data[:-1] if how == "cut" else bytes([data[0] ^ 1]) + data[1:])
    with caplog.at_level(logging.WARNING):
        found = CheckpointStore(tmp_path, 2).newest()
    assert found is not None and found.step == 1
    assert f"step-000002/{part}" in caplog.text
    with pytest.raises(errors.DataLoss, match=part):
        CheckpointStore(tmp_path, 2).open("step-000002")


def test_an_unknown_name_lists_what_there_is(tmp_path: Path) -> None:
    write(tmp_path, 7)
    with pytest.raises(errors.NotFound, match="step-000007"):
        CheckpointStore(tmp_path, 2).open("step-000008")
    with pytest.raises(errors.InvalidArgument):
        CheckpointStore(tmp_path, 2).open("../step-000007")


def test_nothing_there(tmp_path: Path) -> None:
    assert CheckpointStore(tmp_path / "none", 2).newest() is None


def test_metrics_go_on_without_gap_or_duplicate(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = MetricsFile(path)
    metrics.rewind(0)
    for step in range(1, 6):
        metrics.append({"step": step, "loss": 0.5})
    with path.open("a") as file:
        file.write('{"step": 6, "lo')
    assert metrics.rewind(3, {"step": 3, "loss": 9.0}) == {"step": 3, "loss": 0.5}
    metrics.append({"step": 4, "loss": 0.25})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert metrics.rewind(5, {"step": 5, "loss": 1.0}) == {"step": 5, "loss": 1.0}
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5]
