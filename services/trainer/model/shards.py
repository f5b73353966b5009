"""Tensors in files, each rank its own rows: any number of ranks can read what any other number wrote.

The format is that of torch.distributed.checkpoint's Hugging Face storage: safetensors whose header says at which
offsets of the whole tensor a piece lies. A file without that entry holds whole tensors. No pickle, and no collective:
a rank reads only the rows that it keeps.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from paceline.rpc import errors

_SHARDING = "DCP_SHARDING_INFO"
_OFFSETS = "saved_offsets"


@dataclass(frozen=True)
class Piece:
    """Which rows of a tensor a rank keeps. Tensors are cut along their first dimension only."""

    start: int
    shape: tuple[int, ...]
    """Of the whole tensor."""


def file_name(rank: int) -> str:
    """Name of a rank's file in a folder of pieces."""
    return f"rank-{rank:05d}.safetensors"


def serialize(tensors: Mapping[str, Tensor], pieces: Mapping[str, Piece]) -> bytes:
    """The file of one rank. `pieces` has an entry for each tensor that is cut."""
    offsets = {}
    for name, item in tensors.items():
        start = pieces[name].start if name in pieces else 0
        offsets[name] = {_OFFSETS: [start if axis == 0 else 0 for axis in range(item.ndim)]}
    # One entry only: safetensors writes several in any order, and equal states must be equal files.
    metadata = {_SHARDING: json.dumps(offsets, sort_keys=True)}
    content = {name: item.detach().cpu().contiguous() for name, item in tensors.items()}
    return safetensors.torch.save(content, metadata=metadata)


class PieceReader:
    """Reads rows of tensors from all files of a folder. DataLoss names what is missing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._places: dict[str, list[tuple[int, int, Any]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of whole tensors, by name."""
        for path in sorted(folder.glob("*.safetensors")):
            self._index(path)

    def _index(self, path: Path) -> None:
        try:
            file: Any = safetensors.safe_open(path, framework="pt")
        except (OSError, safetensors.SafetensorError) as error:
            raise errors.DataLoss(f"{path} is torn: {error}") from error
        sharding = json.loads((file.metadata() or {}).get(_SHARDING, "{}"))
        for name in file.keys():  # noqa: SIM118  a safetensors handle cannot be iterated over
            shape = tuple(file.get_slice(name).get_shape())
            start = sharding[name][_OFFSETS][0] if name in sharding and shape else 0
            count = shape[0] if shape else 0
            self._places.setdefault(name, []).append((start, count, file))
            known = self.shapes.get(name, shape)
            self.shapes[name] = (max(known[0], start + count), *shape[1:]) if shape else shape

    def __contains__(self, name: str) -> bool:
        return name in self.shapes

    def read(self, name: str, piece: Piece | None, rows: int) -> Tensor:
        """A new tensor with `rows` rows from piece.start on; the whole tensor when `piece` is None."""
        places = self._places[name]
        if not self.shapes[name]:
            return places[0][2].get_tensor(name).clone()
        if piece is None:
            piece, rows = Piece(0, self.shapes[name]), self.shapes[name][0]
        parts, reached, stop = [], piece.start, piece.start + rows
        for start, count, file in sorted(places, key=lambda item: item[:2]):
            if start <= reached < min(stop, start + count):
                end = min(stop, start + count)
                parts.append(file.get_slice(name)[reached - start : end - start])
                reached = end
        if reached != stop:
            raise errors.DataLoss(f"{self.folder}: rows {reached} to {stop} of {name} are in none of its files")
        if not parts:
            return torch.empty((0, *piece.shape[1:]), dtype=places[0][2].get_slice(name)[:0].dtype)
        # A copy, not a view of the file: alignment of memory must not depend on where a state came from.
        return torch.cat(parts) if len(parts) > 1 else parts[0].clone()
