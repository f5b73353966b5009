"""Lays the datums of a micro-batch out as one stream of tokens, and says which of them a context rank has. NumPy only.

Context ranks share the stream, whatever sequences are in it: cut into twice as many pieces as ranks, each has one from
the front and the one as far from the back, so that attention costs them the same (zigzag). Llama 3, arXiv:2407.21783.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from services.trainer.datum import Datum


@dataclass(frozen=True)
class Stream:
    """One micro-batch. Sizes: T tokens with padding, S sequences, N predicted tokens."""

    token_ids: np.ndarray
    """int64 [T]"""
    positions: np.ndarray
    """int64 [T]: in their sequence"""
    bounds: np.ndarray
    """int64 [S + 1]: where sequences start; padding at the end is one of them"""
    source: np.ndarray
    """int64 [N]: place in the stream that predicts the token"""
    targets: np.ndarray
    """int64 [N]: the predicted token"""
    datum_index: np.ndarray
    """int64 [N]: which datum the token belongs to"""
    token_index: np.ndarray
    """int64 [N]: where in that datum"""
    temperature: np.ndarray
    """float32 [N]"""


@dataclass(frozen=True)
class Segments:
    """Which keys a context rank's queries see: Q pieces of sequences, each causal up to its last query."""

    queries: np.ndarray
    """int64 [Q + 1]: bounds in the rank's own tokens"""
    key_starts: np.ndarray
    """int64 [Q]: in the stream"""
    key_stops: np.ndarray
    """int64 [Q]: in the stream; the last query sees key stop - 1, the one before up to stop - 2, and so on"""


def stream_of(members: Sequence[int], data: Sequence[Datum], every_token: bool, multiple: int) -> Stream:
    """The datums `members` one after another, padded to a multiple. Predicted are the tokens with a weight, or all."""
    lengths = [len(data[member].token_ids) for member in members]
    bounds = [0, *np.cumsum(lengths, dtype=np.int64).tolist()]
    total = max(multiple, -(-bounds[-1] // multiple) * multiple)
    token_ids, positions = np.zeros(total, np.int64), np.zeros(total, np.int64)
    source, targets, datum_index, token_index, temperature = [], [], [], [], []
    for member, start in zip(members, bounds, strict=False):
        datum = data[member]
        count = len(datum.token_ids)
        token_ids[start : start + count] = datum.token_ids
        positions[start : start + count] = np.arange(count)
        chosen = np.arange(1, count) if every_token else np.flatnonzero(datum.weights)
        source.append(start + chosen - 1)
        targets.append(datum.token_ids[chosen].astype(np.int64))
        datum_index.append(np.full(len(chosen), member, np.int64))
        token_index.append(chosen)
        temperature.append(np.full(len(chosen), datum.temperature, np.float32))
    if total > bounds[-1]:
        positions[bounds[-1] :] = np.arange(total - bounds[-1])
        bounds.append(total)
    return Stream(
        token_ids, positions, np.array(bounds), _joined(source), _joined(targets), _joined(datum_index),
        _joined(token_index), _joined(temperature, np.float32),
    )  # fmt: skip


def places_of(total: int, rank: int, ranks: int) -> np.ndarray:
    """int64 [T / ranks]: the places in a stream of T tokens that a context rank has, in order."""
    if ranks == 1:
        return np.arange(total)
    piece = total // (2 * ranks)
    back = 2 * ranks - 1 - rank
    return np.concatenate([np.arange(rank * piece, (rank + 1) * piece), np.arange(back * piece, (back + 1) * piece)])


def segments_of(bounds: np.ndarray, rank: int, ranks: int) -> Segments:
    """What the queries of a context rank see."""
    total = int(bounds[-1])
    piece = total // (2 * ranks)
    queries, starts, stops = [0], [], []
    own = [(number * piece, (number + 1) * piece) for number in (rank, 2 * ranks - 1 - rank)]
    for begin, end in own if ranks > 1 else [(0, total)]:
        for first, last in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
            count = min(end, last) - max(begin, first)
            if count > 0:
                queries.append(queries[-1] + count)
                starts.append(first)
                stops.append(min(end, last))
    return Segments(np.array(queries), np.array(starts), np.array(stops))


def _joined(parts: Sequence[np.ndarray], dtype: type = np.int64) -> np.ndarray:
    return np.concatenate(parts).astype(dtype) if parts else np.zeros(0, dtype)
