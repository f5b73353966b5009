"""Attention for rows that lie one after another in a stream of tokens: no row sees another, and no token is padding.

Linear layers, most of the work, run over exactly the tokens that there are. Only attention needs rows: on a GPU one
kernel takes them all at their lengths; elsewhere rows of like widths are put side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from services.trainer.packing import PackedBatch, visible_of

NAME = "paceline_rows"
SHORT_ROW = 128
"""Rows up to this width use the attention that is written out. On a CPU the fused kernel's backward pass costs two to
four times as much there in bfloat16 (measured at widths 44 to 128); beyond, the matrix of scores would dominate."""
_LIKE = 0.8
"""Rows share a call when the narrowest has this part of the width of the widest."""
_HALVES = (torch.bfloat16, torch.float16)


@dataclass
class _Bucket:
    """Rows of like widths: S rows, the widest of W tokens, in the stream from `start` to `stop`."""

    start: int
    stop: int
    rows: int
    width: int
    places: Tensor | None
    """int64 [S * W] from `start`, what lies at each place; None where every row has W tokens"""
    tokens: Tensor | None
    """int64 [stop - start]: the place of each token, the inverse"""
    visible: Tensor | None
    """bool [S, 1, W, W]; None for the causal order"""


class Rows:
    """Where the rows of a batch lie, on a device, for a model that computes in `dtype`."""

    def __init__(self, batch: PackedBatch, device: torch.device, dtype: torch.dtype) -> None:
        assert batch.row_widths is not None
        self._written_out = device.type == "cpu"
        widths, segments = batch.row_widths, batch.row_segments
        starts = np.concatenate([[0], np.cumsum(widths)])
        plain = np.array([item is None for item in segments])
        # Of one width they need no kernel of their own: the usual one takes them as they lie.
        by_kernel = device.type == "cuda" and dtype in _HALVES and len(set(widths[plain].tolist())) > 1
        # Rows are in the order of `pack`: the plain ones first, then the shared ones, wide before narrow in both.
        count = int(plain.sum()) if by_kernel else 0
        self.kernel_tokens = int(starts[count])
        self.kernel_starts = torch.from_numpy(starts[: count + 1]).int().to(device)
        self.kernel_width = int(widths[:count].max(initial=0))
        self.buckets: list[_Bucket] = []
        first = count
        for row in range(count + 1, len(widths) + 1):
            if row < len(widths) and plain[row] == plain[first] and widths[row] >= _LIKE * widths[first]:
                continue
            self.buckets.append(_bucket(starts[first : row + 1], segments[first:row], device))
            first = row

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """[T, heads, D] from query [T, heads, D], key and value [T, groups, D]."""
        parts = []
        if self.kernel_tokens:
            stop = self.kernel_tokens
            parts.append(self._by_kernel(query[:stop], key[:stop], value[:stop], scale))
        for bucket in self.buckets:
            parts.append(self._in_bucket(bucket, query, key, value, scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _by_kernel(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        # Keys and values go in as they are: the kernel takes fewer heads of them than of queries.
        return varlen_attn(
            query.contiguous(), key.contiguous(), value.contiguous(), self.kernel_starts, self.kernel_starts,
            self.kernel_width, self.kernel_width, scale=scale, window_size=(-1, 0),
        )  # type: ignore[return-value]  # fmt: skip

    def _in_bucket(self, bucket: _Bucket, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        placed = []
        for item in (query, key, value):
            item = item[bucket.start : bucket.stop]
            if bucket.places is not None:
                item = item.index_select(0, bucket.places)
            placed.append(item.view(bucket.rows, bucket.width, *item.shape[1:]).transpose(1, 2))
        attend = _written_out if self._written_out and bucket.width <= SHORT_ROW else _fused
        found = attend(placed[0], placed[1], placed[2], bucket.visible, scale).transpose(1, 2).flatten(0, 1)
        return found if bucket.tokens is None else found.index_select(0, bucket.tokens)


def _bucket(starts: np.ndarray, segments: list[np.ndarray | None], device: torch.device) -> _Bucket:
    begin, counts = int(starts[0]), np.diff(starts)
    width = int(counts.max())
    places = tokens = visible = None
    inside = np.arange(width)[None] < counts[:, None]
    if not inside.all():
        places = np.where(inside, (starts[:-1] - begin)[:, None] + np.arange(width)[None], 0).reshape(-1)
        tokens = torch.from_numpy(np.flatnonzero(inside)).to(device)
        places = torch.from_numpy(places).to(device)
    if segments[0] is not None:
        padded = np.full((len(counts), width), -1, np.int64)
        for row, item in enumerate(segments):
            assert item is not None
            padded[row, : len(item)] = item
        visible = torch.from_numpy(visible_of(padded)).to(device).unsqueeze(1)
    return _Bucket(begin, int(starts[-1]), len(counts), width, places, tokens, visible)


def _fused(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
    if query.is_cuda and visible is None:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=visible is None, scale=scale)


def _written_out(query: Tensor, key: Tensor, value: Tensor, visible: Tensor | None, scale: float | None) -> Tensor:
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    if visible is None:
        visible = torch.ones(query.shape[2], query.shape[2], dtype=torch.bool, device=query.device).tril()
    scores = query @ key.transpose(2, 3) * (scale if scale is not None else query.shape[-1] ** -0.5)
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    kind = torch.float64 if scores.dtype == torch.float64 else torch.float32
    return scores.softmax(-1, dtype=kind).to(query.dtype) @ value


@torch.compiler.disable
def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *, rows: Rows | None = None,
    scaling: float | None = None, dropout: float = 0.0, **named: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """What transformers calls: query [1, heads, T, D] -> [1, T, heads, D].

    Without rows somebody else calls the model between our passes: its batch is attended as transformers does.
    """
    if rows is None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **named
        )  # fmt: skip
    found = rows.attend(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scaling)
    return found.unsqueeze(0), None


AttentionInterface.register(NAME, _attention)
