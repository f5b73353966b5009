"""Blobs: whole or not at all, verified when read, and removed when the ledger says that nobody needs them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.api.common.v1.array_pb2 import BlobReference
from paceline.blobs import BlobKeeper, Owner
from paceline.blobs.stores.file import File
from paceline.ledger import Ledger
from paceline.rpc import errors
from paceline.samples import SampleGroup
from paceline.stream import Claim, SampleStream
from paceline.testing.groups import make_group

RUN = "blobs"
ROUTING = np.arange(24, dtype=np.int16).reshape(4, 3, 2)


def store_in(directory: Path, **options: Any) -> File:
    return File(File.Options(**options), directory, RUN)


@pytest.mark.parametrize("array", [ROUTING, ROUTING.astype(np.uint8), np.zeros((0, 2), np.float32)])
def test_what_is_put_comes_back_in_another_process(tmp_path: Path, array: np.ndarray) -> None:
    reference = store_in(tmp_path).put(Owner("e0.7", 2), "0.routing", array)
    again = BlobReference.FromString(reference.SerializeToString())
    found = store_in(tmp_path).get(again, "sample e0.7/0")
    assert found.dtype == array.dtype and found.shape == array.shape and (found == array).all()
    assert store_in(tmp_path).owners() == [Owner("e0.7", 2)]


def test_runs_of_one_name_do_not_meet_under_a_common_root(tmp_path: Path) -> None:
    roots = {store_in(tmp_path / name, root=str(tmp_path / "memory")).root for name in ("a", "b")}
    assert len(roots) == 2 and all(root.parent == tmp_path / "memory" for root in roots)


def test_altered_cut_and_missing_blobs_are_named(tmp_path: Path) -> None:
    store = store_in(tmp_path)
    reference = store.put(Owner("e0.7", 1), "0.routing", ROUTING)
    path = store.root / reference.uri
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    with pytest.raises(errors.DataLoss, match=rf"sample s: blob .*{path.name} has the checksum"):
        store.get(reference, "sample s")
    path.write_bytes(b"")
    with pytest.raises(errors.DataLoss, match="has the checksum"):
        store.get(reference, "sample s")
    path.unlink()
    with pytest.raises(errors.DataLoss, match="cannot be read: No such file"):
        store.get(reference, "sample s")


@pytest.mark.parametrize("uri", ["../secret", "/etc/passwd", "e0.7-1/../../x", "e0.7-1", "e0.7-0/x", ""])
def test_references_stay_under_the_root(tmp_path: Path, uri: str) -> None:
    (tmp_path / "secret").write_text("x")
    with pytest.raises(errors.DataLoss, match="is no blob of this store"):
        store_in(tmp_path).get(BlobReference(uri=uri), "sample s")


def test_a_write_that_is_cut_off_leaves_nothing_that_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(tmp_path)
    monkeypatch.setattr(Path, "replace", _full)
    with pytest.raises(OSError, match="no space"):
        store.put(Owner("e0.7", 1), "0.routing", ROUTING)
    assert list((store.root / "e0.7-1").iterdir()) == []


def _full(*arguments: object) -> None:
    raise OSError(28, "no space")


class Run:
    """A ledger with a stream, and the blobs of its groups."""

    def __init__(self, client: Any, directory: Path) -> None:
        self.ledger, self.stream = Ledger(client, RUN), SampleStream(client, RUN, 16)
        self.store = store_in(directory)
        self.keeper = BlobKeeper(self.store, self.ledger)

    async def make(self, count: int = 1) -> list[SampleGroup]:
        """Groups that are generated, with routing that was written."""
        groups = []
        for issue in await self.ledger.issue("rollout-0", count, 60, None):
            group = make_group(RUN, issue.group_id, issue.attempt)
            for sample in group.samples:
                sample.attached["routing"] = ROUTING
            await self.keeper.write(group)
            groups.append(group)
        return groups

    def kept(self) -> set[str]:
        return {f"{owner.group_id}#{owner.attempt}" for owner in self.store.owners()}


@pytest.fixture
async def run(redis_client: Any, tmp_path: Path) -> Run:
    found = Run(redis_client, tmp_path)
    await found.ledger.initialise(10, 1)
    return found


async def test_blobs_are_kept_until_a_checkpoint_has_the_step(run: Run) -> None:
    for group in await run.make(2):
        assert await run.stream.put(group) == "accepted"
    assert await run.keeper.sweep() == 0
    claim = await run.stream.claim("trainer-0", 1, 2, 1, 0)
    assert isinstance(claim, Claim)
    await run.keeper.read(claim.groups)
    assert all((sample.attached["routing"] == ROUTING).all() for group in claim.groups for sample in group.samples)
    await run.stream.mark_trained(1)
    assert await run.keeper.sweep() == 0
    assert await run.stream.rewind(0) == [1]
    assert await run.keeper.sweep() == 0 and len(run.kept()) == 2, "the step may be trained again"
    await run.stream.mark_trained(1)
    await run.stream.commit(1)
    assert await run.keeper.sweep() == 2
    assert run.kept() == set()


async def test_blobs_of_dropped_failed_and_reissued_groups_go(run: Run) -> None:
    dropped, failed, released, kept = await run.make(4)
    await run.ledger.drop(dropped.group_id, 1, "filtered")
    await run.ledger.fail(failed.group_id, 1, "x", 1)
    await run.stream.put(kept)
    assert await run.ledger.release("rollout-0") == [released.group_id]
    assert await run.keeper.sweep() == 3
    [again] = await run.make()
    assert run.kept() == {f"{kept.group_id}#1", f"{released.group_id}#2"} and again.attempt == 2


async def test_blobs_of_groups_that_were_too_old_go(run: Run) -> None:
    [group] = await run.make()
    await run.stream.put(group)
    await run.stream.claim("trainer-0", 1, 1, 5, 1, "reissue")
    assert await run.keeper.sweep() == 1


async def test_nothing_is_removed_while_the_ledger_is_lost(run: Run, redis_client: Any) -> None:
    await run.make()
    await redis_client.flushall()
    with pytest.raises(errors.FailedPrecondition):
        await run.keeper.sweep()
    assert run.kept() == {"e0.0#1"}


async def test_what_a_killed_write_left_goes_with_its_attempt(run: Run) -> None:
    [group] = await run.make()
    folder = run.store.root / f"{group.group_id}-1"
    (folder / ".abc.partial").write_bytes(b"half")
    assert await run.keeper.sweep() == 0
    await run.ledger.release("rollout-0")
    await run.keeper.sweep()
    assert not folder.exists()


async def test_no_room_is_not_the_fault_of_the_prompt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", _full)
    with pytest.raises(errors.ResourceExhausted, match="its routing cannot be written: no space"):
        await run.make()
    assert run.kept() == set()
