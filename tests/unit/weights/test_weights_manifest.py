"""Manifests name what is torn or changed, and never accept a path that leaves the directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.rpc import errors
from paceline.weights.manifest import FILE_NAME, Manifest, content_digest


def write_tensors(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """A safetensors file of float32 arrays, written out by hand."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, array in arrays.items():
        header[name] = {"dtype": "F32", "shape": list(array.shape), "data_offsets": [offset, offset + array.nbytes]}
        offset += array.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(item.tobytes() for item in arrays.values()))


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A directory of two files and a manifest."""
    write_tensors(tmp_path / "a.safetensors", {"w": np.arange(6, dtype="<f4").reshape(2, 3), "b": np.ones(2, "<f4")})
    write_tensors(tmp_path / "b.safetensors", {"head": np.zeros((4, 1), "<f4")})
    Manifest.describe(tmp_path, weight_version=3, step=2, kind="full").write(tmp_path)
    return tmp_path


def edit(directory: Path, change: Any) -> None:
    raw = json.loads((directory / FILE_NAME).read_text())
    change(raw)
    (directory / FILE_NAME).write_text(json.dumps(raw))


def test_round_trip(version: Path) -> None:
    manifest = Manifest.read(version)
    manifest.verify(version)
    assert (manifest.weight_version, manifest.step, manifest.kind) == (3, 2, "full")
    assert {item.name: tuple(item.shape) for item in manifest.tensors} == {"w": (2, 3), "b": (2,), "head": (4, 1)}
    assert manifest.num_bytes == sum(path.stat().st_size for path in version.glob("*.safetensors"))


def test_reads_what_the_safetensors_package_writes(tmp_path: Path) -> None:
    numpy_files = pytest.importorskip("safetensors.numpy")
    numpy_files.save_file({"x": np.ones((2, 2), np.float16)}, tmp_path / "m.safetensors")
    manifest = Manifest.describe(tmp_path, 1, 0, "adapter", {"r": 8})
    assert [(item.name, item.dtype, item.shape) for item in manifest.tensors] == [("x", "F16", [2, 2])]
    manifest.write(tmp_path)
    assert Manifest.read(tmp_path).adapter_config == {"r": 8}


def test_digest_depends_on_content_only(tmp_path: Path) -> None:
    rows = [("a", "F32", [2], "0" * 64), ("b", "F32", [1], "1" * 64)]
    assert content_digest(rows) == content_digest(reversed(rows))
    for changed in (("a", "BF16", [2], "0" * 64), ("a", "F32", [2, 1], "0" * 64), ("c", "F32", [2], "0" * 64)):
        assert content_digest([changed, rows[1]]) != content_digest(rows)


def test_split_over_files_does_not_change_the_digest(version: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    write_tensors(
        other / "all.safetensors",
        {"head": np.zeros((4, 1), "<f4"), "b": np.ones(2, "<f4"), "w": np.arange(6, dtype="<f4").reshape(2, 3)},
    )
    assert Manifest.describe(other, 9, 9, "full").digest == Manifest.read(version).digest


def test_cut_off_file_is_named(version: Path) -> None:
    path = version / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(errors.DataLoss, match=r"b\.safetensors has \d+ bytes, its manifest says \d+"):
        Manifest.read(version)


def test_missing_file_is_named(version: Path) -> None:
    (version / "a.safetensors").unlink()
    with pytest.raises(errors.DataLoss, match=r"a\.safetensors is missing"):
        Manifest.read(version)


def test_changed_byte_names_its_tensor(version: Path) -> None:
    path = version / "a.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    manifest = Manifest.read(version)
    with pytest.raises(errors.DataLoss, match=r"tensor 'b' in .*a\.safetensors of weight version 3"):
        manifest.verify(version)


def test_torn_manifest_is_named(version: Path) -> None:
    path = version / FILE_NAME
    path.write_text(path.read_text()[:50])
    with pytest.raises(errors.DataLoss, match="not a manifest"):
        Manifest.read(version)
    path.unlink()
    with pytest.raises(errors.DataLoss, match="torn"):
        Manifest.read(version)


def test_wrong_content_digest_is_named(version: Path) -> None:
    edit(version, lambda raw: raw.update(digest="f" * 64))
    with pytest.raises(errors.DataLoss, match="f" * 64):
        Manifest.read(version)


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "..", "a/b", "", "manifest.json", "a\\b"])
def test_names_stay_in_the_directory(version: Path, name: str) -> None:
    edit(version, lambda raw: raw["files"][0].update(name=name))
    with pytest.raises(errors.DataLoss, match="plain name"):
        Manifest.read(version)


def test_garbled_tensor_file_is_named(version: Path) -> None:
    path = version / "b.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)
    with pytest.raises(errors.DataLoss, match=r"b\.safetensors"):
        Manifest.read(version).verify(version)
