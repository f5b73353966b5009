"""Keys and values in place: a store of shared prompts by slot, and one of generated tokens by row.

Nothing is copied from step to step; attention reads views. On a CPU the pages of unused places are never touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

STEP = 32
"""Key lengths are padded to multiples of this: then trailing masked keys do not change a result bit on a CPU."""

_ALIGNMENT = 64
"""As torch aligns; another alignment may change the rounding of a matrix product."""


def padded(length: int, step: int = STEP) -> int:
    """The next multiple of `step`."""
    return -(-length // step) * step


@dataclass
class LayerStore:
    """Keys and values of one layer; each [slots or rows, key-value heads, max length, head size]."""

    prefix_keys: torch.Tensor
    prefix_values: torch.Tensor
    own_keys: torch.Tensor
    own_values: torch.Tensor


class KeyValueCache:
    """The stores of all layers, made when a layer first writes, because only then its shape is certain."""

    def __init__(self, num_slots: int, num_rows: int, max_length: int) -> None:
        self.num_slots = num_slots
        self.num_rows = num_rows
        self.max_length = padded(max_length)
        self._layers: dict[int, LayerStore] = {}

    @torch.inference_mode()
    def layer(self, index: int, like: torch.Tensor) -> LayerStore:
        """The store of a layer; `like` [batch, heads, length, size] gives shape, dtype and device to a fresh one."""
        store = self._layers.get(index)
        if store is None:
            shape = (like.shape[1], self.max_length, like.shape[3])
            make = [_zeros((count, *shape), like) for count in self._counts()]
            store = self._layers[index] = LayerStore(*make)
        return store

    @torch.inference_mode()
    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of a slot to another."""
        for store in self._layers.values():
            for tensor in (store.prefix_keys, store.prefix_values):
                tensor[target, :, :length] = tensor[source, :, :length]

    @torch.inference_mode()
    def move_own(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` places of a row to another."""
        for store in self._layers.values():
            for tensor in (store.own_keys, store.own_values):
                tensor[target, :, :length] = tensor[source, :, :length]

    def _counts(self) -> tuple[int, int, int, int]:
        return self.num_slots, self.num_slots, self.num_rows, self.num_rows


def _zeros(shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
    """Zeros in the dtype and on the device of `like`; on a CPU of pages that take memory only once written."""
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    num_bytes = int(np.prod(shape)) * like.element_size()
    memory = np.zeros(num_bytes + _ALIGNMENT, np.uint8)
    first = -memory.ctypes.data % _ALIGNMENT
    return torch.from_numpy(memory[first : first + num_bytes]).view(like.dtype).view(shape)
