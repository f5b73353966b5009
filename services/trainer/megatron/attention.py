"""Causal attention without Transformer Engine: of packed sequences, over context ranks, and of padded batches.

megatron-core's own module keeps all scores for the backward pass, takes no packed sequences and no context ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from services.trainer.megatron.stream import Segments


class KernelPlan:
    """Segments as torch's flash attention takes them, on a device."""

    def __init__(self, segments: Segments, device: torch.device) -> None:
        counts = segments.key_stops - segments.key_starts
        keys = np.cumsum([0, *counts])
        self.chosen: Tensor | None = None
        """int64: the keys one segment after another, where they do not lie so"""
        if (segments.key_starts != keys[:-1]).any():
            ranges = [np.arange(*ends) for ends in zip(segments.key_starts, segments.key_stops, strict=True)]
            self.chosen = torch.from_numpy(np.concatenate(ranges)).to(device)
        self.queries = torch.from_numpy(segments.queries).int().to(device)
        self.keys = torch.from_numpy(keys).int().to(device)
        self.longest_query, self.longest_key = int(np.diff(segments.queries).max()), int(counts.max())


@dataclass
class PackedTokens(PackedSeqParams):
    """megatron-core's description of a packed batch, with what our attention needs besides."""

    segments: Segments | None = None
    positions: Tensor | None = None
    """int64 [T]: of each token in its sequence."""
    plan: KernelPlan | None = None
    """Made by the first layer of a pass, for the others."""


class CoreAttention(nn.Module):
    """The `core_attention` of a megatron layer. No dropout, no bias."""

    def __init__(self, config: Any, pg_collection: Any, softmax_scale: float | None = None, **ignored: Any) -> None:
        super().__init__()
        self._scale = softmax_scale
        self._context = pg_collection.cp

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
        packed_seq_params: PackedTokens | None = None, **ignored: Any,
    ) -> Tensor:  # fmt: skip
        """Packed: query [t, heads, d], key and value [t, groups, d] of this context rank's tokens -> [t, heads, d].

        Otherwise [s, b, heads, d] -> [s, b, heads * d], causal; padding on the right changes nothing before it.
        """
        if packed_seq_params is None:
            return self._padded(query, key, value)
        segments = packed_seq_params.segments
        assert segments is not None
        key, value = (_all_tokens(item, self._context) for item in (key, value))
        if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
            packed_seq_params.plan = packed_seq_params.plan or KernelPlan(segments, query.device)
            return _by_kernel(query, key, value, packed_seq_params.plan, self._scale)
        return _one_by_one(query, key, value, segments, self._scale)

    def _padded(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = (item.permute(1, 2, 0, 3) for item in (query, *_repeated(query, key, value)))
        found = scaled_dot_product_attention(query, key, value, is_causal=True, scale=self._scale)
        return found.permute(2, 0, 1, 3).flatten(2)


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, segments: Segments, scale: float | None) -> Tensor:
    """A call for each segment: what a CPU can do."""
    key, value = _repeated(query, key, value)
    found = []
    rows = query.split(np.diff(segments.queries).tolist())
    for part, start, stop in zip(rows, segments.key_starts.tolist(), segments.key_stops.tolist(), strict=True):
        count = stop - start
        mask = None
        if len(part) < count:
            mask = torch.ones(len(part), count, dtype=torch.bool, device=query.device).tril(count - len(part))
        own, keys, values = (item.transpose(0, 1).unsqueeze(0) for item in (part, key[start:stop], value[start:stop]))
        attended = scaled_dot_product_attention(own, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale)
        found.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(found)


def _by_kernel(query: Tensor, key: Tensor, value: Tensor, plan: KernelPlan, scale: float | None) -> Tensor:
    """All segments in one call of torch's flash attention."""
    from torch.nn.attention.varlen import varlen_attn

    if plan.chosen is not None:
        key, value = key.index_select(0, plan.chosen), value.index_select(0, plan.chosen)
    key, value = _repeated(query, key, value)
    return varlen_attn(
        query.contiguous(), key.contiguous(), value.contiguous(), plan.queries, plan.keys, plan.longest_query,
        plan.longest_key, scale=scale, window_size=(-1, 0),
    )  # type: ignore[return-value]  # fmt: skip


def _repeated(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """A key and value head for each query head. The heads' axis is the last but one."""
    times = query.shape[-2] // key.shape[-2]
    if times == 1:
        return key, value
    return key.repeat_interleave(times, -2), value.repeat_interleave(times, -2)


def _all_tokens(local: Tensor, group: Any) -> Tensor:
    """The tokens of all context ranks in the order of the stream, [total, ...], from [total / ranks, ...]."""
    return local if group.size() == 1 else _AllTokens.apply(local, group)  # type: ignore[return-value]


class _AllTokens(torch.autograd.Function):
    """Gathers; the gradient, which every rank has a part of, is summed.

    Of R ranks, rank r has pieces r and 2R - 1 - r of the stream; see places_of.
    """

    @staticmethod
    def forward(ctx: Any, local: Tensor, group: Any) -> Tensor:
        parts = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(parts, local.contiguous(), group=group)
        ctx.group, piece = group, len(local) // 2
        return torch.cat([part[:piece] for part in parts] + [part[piece:] for part in reversed(parts)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (whole,) = gradients
        whole = whole.contiguous()
        dist.all_reduce(whole, group=ctx.group)
        pieces = whole.chunk(2 * ctx.group.size())
        rank = ctx.group.rank()
        return torch.cat([pieces[rank], pieces[-1 - rank]]), None
