"""Calls of a backend as bytes: a JSON header and raw arrays behind it. Never pickle: what arrives is data, not code."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.datum import Datum
from services.trainer.objective import Objective

_ALIGNMENT = 16
_KINDS = frozenset("biuf")


def encode(call: str, arguments: tuple[Any, ...]) -> bytes:
    """Bytes of a call. TypeError for an argument that is not JSON, an array, a path, a datum or an objective."""
    arrays: list[np.ndarray] = []
    header = json.dumps({"call": call, "arguments": _pack(list(arguments), arrays)}).encode()
    parts = [len(header).to_bytes(8, "little"), header]
    size = 8 + len(header)
    for item in arrays:
        padding = -size % _ALIGNMENT
        parts += [b"\0" * padding, np.ascontiguousarray(item).tobytes()]
        size += padding + item.nbytes
    return b"".join(parts)


def decode(data: bytes) -> tuple[str, list[Any]]:
    """Call and arguments. Arrays are copies that may be changed."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    return header["call"], _Unpacker(data, 8 + length).unpack(header["arguments"])


def _pack(value: Any, arrays: list[np.ndarray]) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in _KINDS:
            raise TypeError(f"an array of {value.dtype} cannot be sent to the other ranks")
        arrays.append(value)
        return {"array": [value.dtype.str, list(value.shape)]}
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Path):
        return {"path": str(value)}
    if isinstance(value, Datum):
        return {"datum": {item.name: _pack(getattr(value, item.name), arrays) for item in dataclasses.fields(Datum)}}
    if isinstance(value, Objective):
        return {"objective": value.spec()}
    if isinstance(value, list | tuple):
        return [_pack(item, arrays) for item in value]
    if isinstance(value, dict):
        return {"dict": {name: _pack(item, arrays) for name, item in value.items()}}
    raise TypeError(f"a {type(value).__name__} cannot be sent to the other ranks")


class _Unpacker:
    """Reads arrays in the order in which they were packed."""

    def __init__(self, data: bytes, start: int) -> None:
        self._data = data
        self._at = start

    def unpack(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self.unpack(item) for item in value]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "array":
            return self._array(*content)
        if kind == "path":
            return Path(content)
        if kind == "datum":
            return Datum(**{name: self.unpack(item) for name, item in content.items()})
        if kind == "objective":
            return Objective.from_spec(content)
        return {name: self.unpack(item) for name, item in content.items()}

    def _array(self, dtype: str, shape: list[int]) -> np.ndarray:
        kind = np.dtype(dtype)
        self._at += -self._at % _ALIGNMENT
        count = int(np.prod(shape, dtype=np.int64))
        found = np.frombuffer(self._data, kind, count, self._at).reshape(shape).copy()
        self._at += count * kind.itemsize
        return found
