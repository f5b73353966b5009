"""Lays datums out in rows: a group's common prefix goes through the model once, each continuation sees only itself.

A row is prefix, then the continuations one after another. Positions restart after the prefix and a block mask hides the
siblings, so the result is that of separate sequences. Rows are padded on the right. NumPy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

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
    row_widths: np.ndarray | None = None
    """int64: tokens of each row, one after another in a single row of W tokens; None for rows below each other"""
    row_segments: list[np.ndarray | None] = field(default_factory=list)
    """For each of them the segments (see visible_of) where it has several datums, else None"""
    routing: np.ndarray | None = None
    """int16 [R, W, num_moe_layers, top_k], -1 where the router chooses; None where it chooses everywhere"""


def common_prefix(group: Group) -> int:
    """Number of leading tokens that all datums of the group share, and that go through the same experts in all."""
    length = min(len(datum.token_ids) for datum in group)
    for datum in group[1:]:
        length = _equal_rows(group[0].token_ids[:length], datum.token_ids[:length])
        one, other = group[0].routing, datum.routing
        if one is not None and other is not None:
            length = min(length, _equal_rows(one[:length], other[:length]))
    return length


def _equal_rows(one: np.ndarray, other: np.ndarray) -> int:
    """How many leading rows of two arrays are equal."""
    count = min(len(one), len(other))
    differs = np.flatnonzero((one[:count] != other[:count]).any(axis=tuple(range(1, one.ndim))))
    return int(differs[0]) if differs.size else count


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


def pack(rows: Sequence[Row], data: Sequence[Datum], every_token: bool = False, stream: bool = False) -> PackedBatch:
    """Lay rows out; Row.members index `data`. Predicted are the tokens with a weight, or every token but the first.

    Below each other, padded on the right; or as a stream, one after another and without padding: those of one datum
    first, then the shared ones, each from the widest to the narrowest. Where nothing is padded nor shared both are one.
    """
    stream = stream and (len({row.width for row in rows}) > 1 or any(len(row.members) > 1 for row in rows))
    if stream:
        rows = sorted(rows, key=lambda row: (len(row.members) > 1, -row.width, row.members))
    widths = np.array([row.width for row in rows])
    width = int(widths.sum()) if stream else int(widths.max())
    shape = (1, width) if stream else (len(rows), width)
    starts = np.cumsum(widths) - widths if stream else np.arange(len(rows)) * width
    laid = _Layout(shape[0] * width, data[rows[0].members[0]].routing)
    for row, start in zip(rows, starts.tolist(), strict=True):
        laid.add(row, start, data, every_token)
    segments = laid.segments.reshape(shape)
    shared = [len(row.members) > 1 for row in rows]
    batch = PackedBatch(
        laid.token_ids.reshape(shape), laid.position_ids.reshape(shape),
        visible_of(segments) if any(shared) and not stream else None, *laid.predicted(),
    )  # fmt: skip
    if laid.routing is not None:
        batch.routing = laid.routing.reshape(*shape, *laid.routing.shape[1:])
    if stream:
        batch.row_widths = widths
        batch.row_segments = [
            laid.segments[start : start + row.width] if many else None
            for row, start, many in zip(rows, starts.tolist(), shared, strict=True)
        ]
    return batch


class _Layout:
    """Flat arrays over all places, and the lists of what is predicted."""

    def __init__(self, places: int, routing: np.ndarray | None = None) -> None:
        """`routing`: that of any datum, where they have it."""
        self.token_ids, self.position_ids = np.zeros(places, np.int64), np.zeros(places, np.int64)
        self.segments = np.full(places, -1, np.int64)
        self.routing = None if routing is None else np.full((places, *routing.shape[1:]), -1, np.int16)
        self._lists: tuple[list[np.ndarray], ...] = ([], [], [], [], [])

    def predicted(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """source, targets, datum_index, token_index and temperature of PackedBatch."""
        one, two, three, four, five = (np.concatenate(pieces) for pieces in self._lists)
        return one, two, three, four, five

    def add(self, row: Row, begin: int, data: Sequence[Datum], every_token: bool) -> None:
        """Write a row at place `begin` and the following."""
        prefix = slice(begin, begin + row.prefix)
        self.token_ids[prefix] = data[row.members[0]].token_ids[: row.prefix]
        self.position_ids[prefix], self.segments[prefix] = np.arange(row.prefix), 0
        start = begin + row.prefix
        for order, member in enumerate(row.members):
            datum = data[member]
            count = len(datum.token_ids)
            stop = start + count - row.prefix
            self.token_ids[start:stop] = datum.token_ids[row.prefix :]
            self.position_ids[start:stop] = np.arange(row.prefix, count)
            self.segments[start:stop] = order + 1
            if self.routing is not None and datum.routing is not None:
                # The last token of a datum has no routing, also where it ends the prefix.
                known = datum.routing[: row.prefix]
                self.routing[begin : begin + len(known)] = known
                self.routing[start : stop - 1] = datum.routing[row.prefix :]
            chosen = np.arange(1, count) if every_token else np.flatnonzero(datum.weights)
            before = chosen - 1
            source, targets, datum_index, token_index, temperature = self._lists
            source.append(np.where(before < row.prefix, before + begin, before - row.prefix + start))
            targets.append(datum.token_ids[chosen].astype(np.int64))
            datum_index.append(np.full(len(chosen), member, np.int64))
            token_index.append(chosen)
            temperature.append(np.full(len(chosen), datum.temperature, np.float32))
            start = stop


def visible_of(segments: np.ndarray) -> np.ndarray:
    """bool [R, W, W] from segment numbers [R, W]: 0 prefix, 1.. continuations, -1 padding, which sees itself only."""
    width = segments.shape[1]
    query, key = segments[:, :, None], segments[:, None, :]
    causal = np.tri(width, dtype=bool)[None]
    same = (key == 0) | (key == query)
    return causal & same & (key >= 0) | np.eye(width, dtype=bool)[None]
