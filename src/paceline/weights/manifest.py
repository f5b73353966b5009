"""manifest.json of a published version: every file and tensor with its digest, so that torn bytes are never served."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from paceline.config.base import StrictModel
from paceline.files import replace
from paceline.rpc import errors
from paceline.weights import tensors as stored

FILE_NAME = "manifest.json"
FORMAT = 1


class FileEntry(StrictModel):
    """One file of a version, directly in its directory."""

    name: str
    num_bytes: int = Field(ge=0)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")

    @field_validator("name")
    @classmethod
    def _plain(cls, value: str) -> str:
        if value in ("", ".", "..", FILE_NAME) or any(part in value for part in ("/", "\\", "\0")):
            raise ValueError(f"file name {value!r} must be a plain name in the version's directory")
        return value


class TensorEntry(StrictModel):
    """One tensor. `dtype` is safetensors' name ("F32", "BF16"); `sha256` is over its little-endian row-major bytes."""

    name: str = Field(min_length=1)
    file: str
    dtype: str
    shape: list[int]
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


def content_digest(tensors: Iterable[tuple[str, str, Iterable[int], str]]) -> str:
    """Hexadecimal SHA-256 over (name, dtype, shape, sha256) of all tensors, in whatever order and files they come."""
    rows = sorted(
        json.dumps([name, dtype, list(shape), sha256], separators=(",", ":")) for name, dtype, shape, sha256 in tensors
    )
    return hashlib.sha256("\n".join(rows).encode()).hexdigest()


class Manifest(StrictModel):
    """What a version's directory holds."""

    format: Literal[1] = FORMAT
    weight_version: int = Field(ge=1)
    step: int = Field(ge=0)
    kind: Literal["full", "adapter"]
    digest: str
    files: list[FileEntry]
    tensors: list[TensorEntry]
    adapter_config: dict[str, Any] | None = None

    @property
    def num_bytes(self) -> int:
        """Size of all files."""
        return sum(item.num_bytes for item in self.files)

    @classmethod
    def describe(
        cls, directory: Path, weight_version: int, step: int, kind: str, adapter_config: dict[str, Any] | None = None
    ) -> Manifest:
        """The manifest of the *.safetensors files in a directory, each read once. Call `write` to store it."""
        files, entries = [], []
        for path in sorted(directory.glob("*.safetensors")):
            whole, digests = stored.hash_file(path)
            files.append({"name": path.name, "num_bytes": path.stat().st_size, "sha256": whole})
            entries += [
                {"name": item.name, "file": path.name, "dtype": item.dtype, "shape": list(item.shape),
                 "sha256": digests[item.name]}
                for item in stored.read_header(path)
            ]  # fmt: skip
        rows = [(item["name"], item["dtype"], item["shape"], item["sha256"]) for item in entries]
        return cls.model_validate({
            "weight_version": weight_version, "step": step, "kind": kind, "digest": content_digest(rows),
            "files": files, "tensors": entries, "adapter_config": adapter_config,
        })  # fmt: skip

    def write(self, directory: Path) -> Path:
        """Store as manifest.json, whole or not at all, and return its path. ValueError when it contradicts itself."""
        self._check(ValueError)
        path = directory / FILE_NAME
        replace(path, json.dumps(self.model_dump(mode="json"), indent=1))
        return path

    @classmethod
    def read(cls, directory: Path) -> Manifest:
        """Read and check against the directory: every file is there at full length. DataLoss names what is not."""
        path = directory / FILE_NAME
        try:
            manifest = cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise errors.DataLoss(
                f"{path} cannot be read: {error.strerror}; the version is torn, publish it again"
            ) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise errors.DataLoss(f"{path} is not a manifest of format {FORMAT}: {where} {first['msg']}") from error
        manifest._check(lambda text: errors.DataLoss(f"{path}: {text}"))
        for item in manifest.files:
            file = directory / item.name
            size = file.stat().st_size if file.is_file() else None
            if size != item.num_bytes:
                found = "is missing" if size is None else f"has {size} bytes"
                raise errors.DataLoss(f"{file} {found}, its manifest says {item.num_bytes}; the version is torn")
        return manifest

    def verify(self, directory: Path) -> None:
        """Hash every byte. DataLoss names the first file or tensor whose digest, dtype or shape differs."""
        entries = {(item.file, item.name): item for item in self.tensors}
        for item in self.files:
            path = directory / item.name
            if not item.name.endswith(".safetensors"):
                self._compare(f"file {path}", stored.hash_bytes(path), item.sha256)
                continue
            whole, digests = stored.hash_file(path)
            for tensor in stored.read_header(path):
                entry = entries.pop((item.name, tensor.name), None)
                if entry is None or (entry.dtype, tuple(entry.shape)) != (tensor.dtype, tensor.shape):
                    raise errors.DataLoss(f"{path}: tensor {tensor.name!r} is not as the manifest says")
                self._compare(f"tensor {tensor.name!r} in {path}", digests[tensor.name], entry.sha256)
            self._compare(f"file {path}", whole, item.sha256)
        if entries:
            file, name = min(entries)
            raise errors.DataLoss(f"tensor {name!r} is not in {directory / file}, though the manifest says so")

    def _compare(self, what: str, found: str, expected: str) -> None:
        if found != expected:
            raise errors.DataLoss(
                f"{what} of weight version {self.weight_version} has digest {found}, its manifest says {expected}"
            )

    def _check(self, fault: Callable[[str], Exception]) -> None:
        names = {item.name for item in self.files}
        if len(names) != len(self.files):
            raise fault("a file is listed twice")
        if len({item.name for item in self.tensors}) != len(self.tensors):
            raise fault("a tensor is listed twice")
        for item in self.tensors:
            if item.file not in names:
                raise fault(f"tensor {item.name!r} is in file {item.file!r}, which is not listed")
        digest = content_digest((item.name, item.dtype, item.shape, item.sha256) for item in self.tensors)
        if digest != self.digest:
            raise fault(f"digest {self.digest} is not that of the tensors, {digest}")
