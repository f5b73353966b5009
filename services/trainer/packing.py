"""Lays datums out in rows: a group's common prefix goes through the model once, each continuation sees only itself.

A row is prefix, then the continuations one after another. Positions restart after the prefix and a block mask hides the
siblings, so the result is that of separate sequences. Rows are padded on the right. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.datum import Datum, Group


@dataclass(frozen=True)
class Row:
    """One row before padding."""

    members: tuple[int, ...]
    """Indices of the datums in it."""
    prefix: int
    """Tokens that they share; 0 for a row of one datum."""
    width: int
    """Tokens of the row."""


@dataclass
class PackedBatch:
    """One forward pass. Sizes: R rows, W width, N predicted tokens."""

    token_ids: np.ndarray
    """int64 [R, W]"""
    position_ids: np.ndarray
    """int64 [R, W]"""
    visible: np.ndarray | None
    """bool [R, W, W]: the query (axis 1) may see the key (axis 2); None when plain causal order is enough."""
    source: np.ndarray
    """int64 [N]: flat index into R * W of the position that predicts the token"""
    targets: np.ndarray
    """int64 [N]: the predicted token"""
    datum_index: np.ndarray
    """int64 [N]: which datum the token belongs to"""
    token_index: np.ndarray
    """int64 [N]: where in that datum"""
    temperature: np.ndarray
    """float32 [N]"""


def common_prefix(group: Group) -> int:
    """Number of leading tokens that all datums of the group share."""
    first = group[0].token_ids
    length = min(len(datum.token_ids) for datum in group)
    for datum in group[1:]:
        differs = np.flatnonzero(first[:length] != datum.token_ids[:length])
        if differs.size:
            length = int(differs[0])
    return length


def rows_of(group: Group, first_index: int, hidden_size: int, share_prefix: bool = True) -> list[Row]:
    """Rows of a group whose datums have the indices from `first_index` on.

    One shared row when that costs less than a row a datum, else a row a datum; see row_cost.
    """
    lengths = [len(datum.token_ids) for datum in group]
    plain = [Row((first_index + i,), 0, length) for i, length in enumerate(lengths)]
    prefix = common_prefix(group)
    if not share_prefix or len(group) < 2 or prefix == 0:
        return plain
    width = prefix + sum(length - prefix for length in lengths)
    if row_cost(width, hidden_size) >= sum(row_cost(length, hidden_size) for length in lengths):
        return plain
    members = tuple(range(first_index, first_index + len(group)))
    return [Row(members, prefix, width)]


def row_cost(tokens: int, hidden_size: int) -> int:
    """Operations of a row up to a factor: T * hidden * 12 in the linear layers and T^2 in attention.

    In a shared row attention is over all siblings.
    """
    return tokens * hidden_size * 12 + tokens * tokens


def empty_batch() -> PackedBatch:
    """One token that predicts nothing: what a rank without work puts through the model beside the others."""
    nothing = np.zeros(0, np.int64)
    return PackedBatch(
        np.zeros((1, 1), np.int64), np.zeros((1, 1), np.int64), None, nothing, nothing, nothing, nothing,
        np.zeros(0, np.float32),
    )  # fmt: skip


def pack(rows: Sequence[Row], data: Sequence[Datum], every_token: bool = False) -> PackedBatch:
    """Lay rows out; Row.members index `data`. Predicted are the tokens with a weight, or every token but the first."""
    width = max(row.width for row in rows)
    shape = (len(rows), width)
    token_ids, position_ids = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)
    source, targets, datum_index, token_index, temperature = [], [], [], [], []
    for number, row in enumerate(rows):
        shared = data[row.members[0]].token_ids[: row.prefix]
        token_ids[number, : row.prefix], position_ids[number, : row.prefix] = shared, np.arange(row.prefix)
        segments[number, : row.prefix] = 0
        start = row.prefix
        for order, member in enumerate(row.members):
            datum = data[member]
            count = len(datum.token_ids)
            stop = start + count - row.prefix
            token_ids[number, start:stop] = datum.token_ids[row.prefix :]
            position_ids[number, start:stop] = np.arange(row.prefix, count)
            segments[number, start:stop] = order + 1
            chosen = np.arange(1, count) if every_token else np.flatnonzero(datum.weights)
            before = chosen - 1
            place = np.where(before < row.prefix, before, before - row.prefix + start)
            source.append(number * width + place)
            targets.append(datum.token_ids[chosen].astype(np.int64))
            datum_index.append(np.full(len(chosen), member, np.int64))
            token_index.append(chosen)
            temperature.append(np.full(len(chosen), datum.temperature, np.float32))
            start = stop
    shared_row = any(len(row.members) > 1 for row in rows)
    return PackedBatch(
        token_ids, position_ids, _visible(segments) if shared_row else None, np.concatenate(source),
        np.concatenate(targets), np.concatenate(datum_index), np.concatenate(token_index), np.concatenate(temperature),
    )  # fmt: skip


def _visible(segments: np.ndarray) -> np.ndarray:
    """bool [R, W, W] from segment numbers [R, W]: 0 prefix, 1.. continuations, -1 padding, which sees itself only."""
    width = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    causal = np.tri(width, dtype=bool)[None]
    same = (key == 0) | (key == query)
    return causal & same & (key >= 0) | np.eye(width, dtype=bool)[None]
