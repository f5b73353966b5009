"""Reads what a safetensors file says of its tensors, and hashes them, without torch or the safetensors package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.rpc import errors

_CHUNK_BYTES = 2**20
_MAX_HEADER_BYTES = 100 * 2**20


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a file: `dtype` is safetensors' name ("F32", "BF16"), `begin` and `end` are offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a safetensors file in the order of their bytes. DataLoss when the file is cut off or garbled."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
                raise errors.DataLoss(f"{path}: a header of {length} bytes does not fit a file of {size} bytes")
            header: dict[str, Any] = json.loads(file.read(length))
        start = 8 + length
        tensors = [
            StoredTensor(
                name,
                item["dtype"],
                tuple(item["shape"]),
                start + item["data_offsets"][0],
                start + item["data_offsets"][1],
            )
            for name, item in header.items()
            if name != "__metadata__"
        ]
    except OSError as error:
        raise errors.DataLoss(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise errors.DataLoss(f"{path} has no safetensors header ({error})") from error
    tensors.sort(key=lambda item: item.begin)
    position = start
    for tensor in tensors:
        if tensor.begin != position or tensor.end < tensor.begin:
            raise errors.DataLoss(f"{path}: bytes of tensor {tensor.name!r} do not follow those before it")
        position = tensor.end
    if position != size:
        raise errors.DataLoss(f"{path} has {size} bytes; its header accounts for {position}")
    return tensors


def hash_file(path: Path) -> tuple[str, dict[str, str]]:
    """SHA-256 of a safetensors file, and of the bytes of each tensor by name, in one reading."""
    whole = hashlib.sha256()
    digests: dict[str, str] = {}
    with path.open("rb") as file:
        tensors = read_header(path)
        for chunk in _chunks(file, tensors[0].begin if tensors else path.stat().st_size):
            whole.update(chunk)
        for tensor in tensors:
            part = hashlib.sha256()
            for chunk in _chunks(file, tensor.end - tensor.begin):
                whole.update(chunk)
                part.update(chunk)
            digests[tensor.name] = part.hexdigest()
    return whole.hexdigest(), digests


def hash_bytes(path: Path) -> str:
    """SHA-256 of a file."""
    whole = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            whole.update(chunk)
    return whole.hexdigest()


def _chunks(file: Any, length: int) -> Iterator[bytes]:
    while length > 0:
        chunk = file.read(min(length, _CHUNK_BYTES))
        if not chunk:
            raise errors.DataLoss(f"{file.name} ended {length} bytes early; was it cut off?")
        length -= len(chunk)
        yield chunk
