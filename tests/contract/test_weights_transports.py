"""What every weight transport must do, over all that are registered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.config import PluginTable, plugin_options
from paceline.plugins import registry
from paceline.rpc import errors
from paceline.weights.manifest import Manifest

NAMES = registry("transport").available()


def make(name: str, tmp_path: Path, run_id: str = "run") -> Any:
    kind = registry("transport").load(name)
    table = PluginTable.model_validate({"name": name, "root": str(tmp_path / "root")})
    (tmp_path / "root").mkdir(exist_ok=True)
    return kind(plugin_options(table, kind.Options, "weights.transport"), tmp_path / "rundir", run_id)


@pytest.fixture(params=NAMES)
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    return make(request.param, tmp_path)


def fill(stage: Path, weight_version: int, value: float = 1.0) -> None:
    data = np.full(4, value, "<f4").tobytes()
    header = b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}'
    (stage / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + data)
    Manifest.describe(stage, weight_version, 0, "full").write(stage)


def publish(transport: Any, weight_version: int, value: float = 1.0) -> str:
    stage = transport.stage(weight_version)
    fill(stage, weight_version, value)
    return transport.publish(stage, weight_version)


def test_built_in_transports_are_there() -> None:
    assert {"shm", "disk"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_another_process_reads_what_was_published(name: str, tmp_path: Path) -> None:
    uri = publish(make(name, tmp_path), 1)
    directory = make(name, tmp_path).open(uri)
    manifest = Manifest.read(directory)
    manifest.verify(directory)
    assert manifest.weight_version == 1


def test_a_stage_is_empty_and_unseen(transport: Any) -> None:
    first, second = transport.stage(2), transport.stage(2)
    assert first != second and not list(first.iterdir())
    fill(first, 2)
    assert transport.collect(set()) == []
    with pytest.raises(errors.InvalidArgument):
        transport.open(str(first))


def test_a_stage_without_manifest_is_not_published(transport: Any) -> None:
    with pytest.raises(errors.FailedPrecondition, match=r"manifest\.json"):
        transport.publish(transport.stage(1), 1)


def test_publishing_again_replaces_whole(transport: Any) -> None:
    first = publish(transport, 3, 1.0)
    assert publish(transport, 3, 2.0) == first
    directory = transport.open(first)
    Manifest.read(directory).verify(directory)
    assert np.frombuffer((directory / "model.safetensors").read_bytes()[-16:], "<f4")[0] == 2.0


def test_collect_keeps_what_it_is_told(transport: Any) -> None:
    uris = {number: publish(transport, number) for number in (1, 2, 10)}
    assert transport.collect({2, 10}) == [1]
    with pytest.raises(errors.NotFound, match="v00000001"):
        transport.open(uris[1])
    assert transport.open(uris[10]).is_dir()
    assert transport.collect(set()) == [2, 10]


@pytest.mark.parametrize("name", NAMES)
def test_left_over_stages_of_a_killed_trainer_go(name: str, tmp_path: Path) -> None:
    left_over = make(name, tmp_path).stage(4)
    transport = make(name, tmp_path)
    own = transport.stage(5)
    transport.collect(set())
    assert own.is_dir() and not left_over.exists()


def test_uris_stay_under_the_root(transport: Any, tmp_path: Path) -> None:
    uri = publish(transport, 1)
    outside = tmp_path / "v00000009"
    outside.mkdir()
    (outside / "manifest.json").write_text("{}")
    link = Path(uri).parent / "v00000009"
    link.symlink_to(outside)
    for bad in (str(outside), f"{uri}/../../v00000009", str(link), "/etc", "", "v00000001"):
        with pytest.raises(errors.InvalidArgument, match="not a version"):
            transport.open(bad)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("run_id", ["../up", "a/b", "", ".hidden"])
def test_unsafe_run_ids_are_refused(name: str, run_id: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="run_id"):
        make(name, tmp_path, run_id)


@pytest.mark.parametrize("number", [0, -1])
def test_versions_start_at_one(transport: Any, number: int) -> None:
    with pytest.raises(ValueError, match=str(number)):
        transport.stage(number)


def test_shared_memory_falls_back_to_the_run_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kind = registry("transport").load("shm")
    transport = kind(kind.Options(root=str(tmp_path / "absent")), tmp_path / "run", "name")
    assert "instead" in caplog.text
    assert Path(publish(transport, 1)).is_relative_to(tmp_path / "run")


def test_runs_of_one_name_in_two_folders_do_not_meet(tmp_path: Path) -> None:
    kind = registry("transport").load("shm")
    options = kind.Options(root=str(tmp_path))
    assert kind(options, tmp_path / "a", "name").root != kind(options, tmp_path / "b", "name").root
