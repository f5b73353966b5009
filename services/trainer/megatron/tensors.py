"""Reads Hugging Face tensors, or rows of them, from model folders and checkpoints. Does not import megatron-core."""

from __future__ import annotations

import torch
from torch import Tensor

from paceline.rpc import errors
from services.trainer.model.shards import Piece, PieceReader
from services.trainer.models.base import ModelFamily


def read_row(reader: PieceReader, family: ModelFamily, name: str, row: int | None, prefix: str = "") -> Tensor:
    """The tensor `prefix + name`, or a row of it, also where a model folder has the row in parts.

    FailedPrecondition when it is not there.
    """
    full = prefix + name
    if full in reader:
        if row is None:
            return reader.read(full, None, 0)
        return reader.read(full, Piece(row, reader.shapes[full]), 1)[0]
    parts = family.stored(name, row) if row is not None and not prefix else []
    if not parts or any(part not in reader for part in parts):
        raise errors.FailedPrecondition(f"{reader.folder} does not hold {full}")
    return torch.cat([reader.read(part, None, 0) for part in parts])
