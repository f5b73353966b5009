"""Publication: equal weights of one step keep their number, lost bytes come back, and no engine loses what it loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.weights.manifest import Manifest
from paceline.weights.transports.disk import Disk
from services.trainer.run.publication import Publisher, Snapshot


class Backend:
    """Holds tensors to publish."""

    kind = "full"

    def __init__(self, value: float) -> None:
        self.value = value

    def weights(self) -> dict[str, torch.Tensor]:
        return {"b": torch.full((2, 3), self.value, dtype=torch.bfloat16), "a": torch.arange(4.0)}

    def adapter_config(self) -> None:
        return None


class FakeControl:
    """Numbers as the coordinator gives them."""

    def __init__(self) -> None:
        self.committed: list[WeightVersion] = []
        self.members: list[pb.Member] = []
        self.waits: list[str] = []
        self._prepared = WeightVersion()

    async def prepare_version(
        self, step: int, digest: str, kind: str, transport: str, floor: int
    ) -> tuple[WeightVersion, bool]:
        if self.committed and (self.committed[-1].digest, self.committed[-1].step) == (digest, step):
            return self.committed[-1], True
        number = max(floor, self.committed[-1].weight_version if self.committed else 0) + 1
        self._prepared = WeightVersion(weight_version=number, step=step, digest=digest)
        return self._prepared, False

    async def commit_version(self, weight_version: int, uri: str, num_bytes: int, traceparent: str) -> WeightVersion:
        self._prepared.uri, self._prepared.num_bytes = uri, num_bytes
        self.committed.append(self._prepared)
        return self._prepared

    @contextmanager
    def waiting(self, cause: str) -> Iterator[None]:
        self.waits.append(cause)
        yield

    async def engines(self) -> list[pb.Member]:
        return self.members


def snapshot(value: float, step: int) -> Snapshot:
    return Snapshot.take(cast(Any, Backend(value)), step)


@pytest.fixture
def control() -> FakeControl:
    return FakeControl()


@pytest.fixture
def publisher(control: FakeControl, tmp_path: Path) -> Publisher:
    return Publisher(cast(Any, control), Disk(Disk.Options(), tmp_path, "run"), "disk", keep=2)


def on_disk(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("v")) for path in (folder / "weights").glob("v*"))


async def test_what_is_published_verifies(publisher: Publisher, tmp_path: Path) -> None:
    version = await publisher.publish(snapshot(1.0, 0))
    manifest = Manifest.read(Path(version.uri))
    manifest.verify(Path(version.uri))
    assert (manifest.weight_version, manifest.step, manifest.digest) == (1, 0, version.digest)
    assert {entry.name: entry.dtype for entry in manifest.tensors} == {"a": "F32", "b": "BF16"}


async def test_the_same_step_keeps_its_number_and_an_idle_step_gets_a_new_one(publisher: Publisher) -> None:
    first = await publisher.publish(snapshot(1.0, 4))
    again = await publisher.publish(snapshot(1.0, 4))
    idle = await publisher.publish(snapshot(1.0, 5))
    assert (first.weight_version, again.weight_version, idle.weight_version) == (1, 1, 2)
    assert idle.digest == first.digest
    assert Manifest.read(Path(idle.uri)).step == 5


async def test_lost_or_altered_bytes_are_written_again(publisher: Publisher) -> None:
    version = await publisher.publish(snapshot(1.0, 4))
    file = Path(version.uri) / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert (await publisher.publish(snapshot(1.0, 4))).weight_version == version.weight_version
    assert file.read_bytes() == data


async def test_numbers_exceed_what_a_checkpoint_knows(publisher: Publisher) -> None:
    assert (await publisher.publish(snapshot(1.0, 4), floor=7)).weight_version == 8


async def test_old_versions_go_but_not_those_in_use(publisher: Publisher, control: FakeControl, tmp_path: Path) -> None:
    for step in range(4):
        await publisher.publish(snapshot(float(step), step))
    assert on_disk(tmp_path) == [3, 4]
    control.members = [pb.Member(member_id="engine-0", state="READY", weight_version=3)]
    for step in range(4, 6):
        await publisher.publish(snapshot(float(step), step))
    assert on_disk(tmp_path) == [3, 5, 6]
    control.members = [pb.Member(member_id="engine-0", state="UPDATING", weight_version=3)]
    for step in range(6, 9):
        await publisher.publish(snapshot(float(step), step))
    assert on_disk(tmp_path) == [3, 5, 6, 7, 8, 9]
    control.members = []
    await publisher.publish(snapshot(9.0, 9))
    assert on_disk(tmp_path) == [9, 10]
