"""Attention of the embedded engine, plugged into transformers under the name "paceline".

Prefill is causal attention within each prompt, whose keys and values go to a slot. Decode attends in two parts, the
prompt in its slot (read once for all its rows) and the row's own tokens, and joins them by their log-sum-exp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from services.engine.embedded.cache import KeyValueCache, LayerStore
from services.engine.embedded.prefixes import LANES

NAME = "paceline"


@dataclass
class PrefillBatch:
    """Prompts of one padded length. slots int64 [batch]."""

    cache: KeyValueCache
    slots: torch.Tensor


@dataclass
class DecodeBatch:
    """One token of each row.

    rows int64 [rows]: 0, 1, ... own_places int64 [rows]: where the token's key goes in the row's own part. lane_rows
    int64 [slots * LANES]: the row of each lane, 0 where there is none. row_lanes int64 [rows]: the inverse. Masks are
    0 or -inf in the model's dtype, [slots, 1, 1, prefix length] and [rows, 1, 1, own length].
    """

    cache: KeyValueCache
    rows: torch.Tensor
    own_places: torch.Tensor
    lane_rows: torch.Tensor
    row_lanes: torch.Tensor
    prefix_mask: torch.Tensor
    own_mask: torch.Tensor


class UnsupportedAttention(ValueError):
    """The model asks for a kind of attention that the embedded engine does not have."""


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    paceline_batch: PrefillBatch | DecodeBatch | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """query [batch, heads, length, size], key and value [batch, key-value heads, length, size] of the new tokens.

    Returns [batch, length, heads, size], as transformers' attention functions do.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown or paceline_batch is None:
        raise UnsupportedAttention(
            f"{type(module).__name__} passes {unknown or 'no batch'} to attention; "
            "engine.backend embedded cannot run it"
        )
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    store = paceline_batch.cache.layer(module.layer_idx, key)  # type: ignore[arg-type]
    if isinstance(paceline_batch, PrefillBatch):
        out = _prefill(query, key, value, store, paceline_batch, scale)
    else:
        out = _decode(query, key, value, store, paceline_batch, scale)
    return out.transpose(1, 2), None


def _prefill(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, store: LayerStore, batch: PrefillBatch, scale: float
) -> torch.Tensor:
    length = key.shape[2]
    store.prefix_keys[:, :, :length].index_copy_(0, batch.slots, key)
    store.prefix_values[:, :, :length].index_copy_(0, batch.slots, value)
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)


def _decode(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, store: LayerStore, batch: DecodeBatch, scale: float
) -> torch.Tensor:
    rows, heads, _, size = query.shape
    kv_heads = key.shape[1]
    shared = heads // kv_heads
    store.own_keys[batch.rows, :, batch.own_places] = key[:, :, 0]
    store.own_values[batch.rows, :, batch.own_places] = value[:, :, 0]
    folded = query.reshape(rows, kv_heads, shared, size)

    slots, prefix_length = batch.prefix_mask.shape[0], batch.prefix_mask.shape[3]
    own_length = batch.own_mask.shape[3]
    lanes = folded.index_select(0, batch.lane_rows).view(slots, LANES, kv_heads, shared, size)
    lanes = lanes.transpose(1, 2).reshape(slots, kv_heads, LANES * shared, size)
    out, weight = partial_attention(
        lanes,
        store.prefix_keys[:slots, :, :prefix_length],
        store.prefix_values[:slots, :, :prefix_length],
        batch.prefix_mask,
        scale,
    )
    out = out.reshape(slots, kv_heads, LANES, shared, size).transpose(1, 2).reshape(-1, kv_heads, shared, size)
    weight = weight.reshape(slots, kv_heads, LANES, shared).transpose(1, 2).reshape(-1, kv_heads, shared)
    out, weight = out.index_select(0, batch.row_lanes), weight.index_select(0, batch.row_lanes)
    own, own_weight = partial_attention(
        folded, store.own_keys[:rows, :, :own_length], store.own_values[:rows, :, :own_length], batch.own_mask, scale
    )
    # Spread before the sigmoid: on a CPU the last few elements of an odd count go through another exp than the rest.
    share = (weight - own_weight)[..., None].expand(-1, -1, -1, size).contiguous().sigmoid()
    joined = torch.lerp(own.float(), out.float(), share)
    return joined.to(query.dtype).view(rows, heads, 1, size)


def partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the keys: output [batch, heads, length, size], and float32 log-sum-exp without size."""
    if query.device.type == "cpu":
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, False, attn_mask=mask, scale=scale
        )
    return plain_partial_attention(query, key, value, mask, scale)


def plain_partial_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """partial_attention by matrix products, for any device."""
    scores = (query @ key.transpose(-1, -2)).float() * scale + mask
    total = scores.logsumexp(-1)
    return (scores - total[..., None]).exp().to(value.dtype) @ value, total


def register() -> None:
    """Make the name known to transformers; doing it again is harmless."""
    AttentionInterface.register(NAME, attend)
