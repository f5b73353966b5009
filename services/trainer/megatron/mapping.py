"""How tensors of a Hugging Face model become one parameter of a megatron model, and the way back, bit for bit.

Joined, a parameter has the axes along which tensor ranks share it; `cut` says which. Does not import megatron-core.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


class Join(Protocol):
    """Some tensors as one."""

    def join(self, tensors: list[Tensor]) -> Tensor:
        """The joined tensor; its axes are those that `Rule.cut` counts."""
        ...

    def split(self, joined: Tensor) -> list[Tensor]:
        """The tensors again."""
        ...

    def unfold(self, parameter: Tensor, ranks: int) -> Tensor:
        """One rank's parameter in the axes of the joined tensor, of which `ranks` ranks have a part each."""
        ...


@dataclass(frozen=True)
class Same:
    """One tensor, as it is."""

    def join(self, tensors: list[Tensor]) -> Tensor:
        """See Join."""
        (tensor,) = tensors
        return tensor

    def split(self, joined: Tensor) -> list[Tensor]:
        """See Join."""
        return [joined]

    def unfold(self, parameter: Tensor, ranks: int) -> Tensor:
        """See Join."""
        return parameter


@dataclass(frozen=True)
class Padded:
    """One tensor whose rows are filled up with zeros, so that all ranks get as many."""

    rows: int
    padded: int

    def join(self, tensors: list[Tensor]) -> Tensor:
        """See Join."""
        (tensor,) = tensors
        if self.rows == self.padded:
            return tensor
        return torch.cat([tensor, tensor.new_zeros(self.padded - self.rows, *tensor.shape[1:])])

    def split(self, joined: Tensor) -> list[Tensor]:
        """See Join."""
        return [joined[: self.rows]]

    def unfold(self, parameter: Tensor, ranks: int) -> Tensor:
        """See Join."""
        return parameter


@dataclass(frozen=True)
class Stacked:
    """Equal shapes on a new first axis: gate and up projection, whose rows each rank has a part of."""

    count: int
    fused: bool = False
    """They are one tensor in the Hugging Face model too, one after another."""

    def join(self, tensors: list[Tensor]) -> Tensor:
        """See Join."""
        if self.fused:
            return self.unfold(tensors[0], 1)
        return torch.stack(tensors)

    def split(self, joined: Tensor) -> list[Tensor]:
        """See Join."""
        return [joined.flatten(0, 1)] if self.fused else list(joined.unbind(0))

    def unfold(self, parameter: Tensor, ranks: int) -> Tensor:
        """See Join."""
        return parameter.unflatten(0, (self.count, -1))


@dataclass(frozen=True)
class Grouped:
    """Rows of several tensors side by side in each of `groups` groups: query heads with their key and value head."""

    groups: int
    rows: tuple[int, ...]
    """Of each tensor in a group."""

    def join(self, tensors: list[Tensor]) -> Tensor:
        """See Join."""
        return torch.cat([item.unflatten(0, (self.groups, -1)) for item in tensors], 1)

    def split(self, joined: Tensor) -> list[Tensor]:
        """See Join."""
        return [item.flatten(0, 1) for item in joined.split(list(self.rows), 1)]

    def unfold(self, parameter: Tensor, ranks: int) -> Tensor:
        """See Join."""
        return parameter.unflatten(0, (self.groups // ranks, -1))


@dataclass(frozen=True)
class Rule:
    """One parameter of a megatron model."""

    parameter: str
    """Its name, in its layer if it has one."""
    tensors: tuple[str, ...]
    """Hugging Face names."""
    join: Join = field(default_factory=Same)
    cut: int | None = None
    """Axis of the joined tensor that tensor ranks share; None: all have the whole."""
    expert: int | None = None
    """Which row of the tensors' first axis this is; None: the whole tensors."""
    copy: bool = False
    """Whether another parameter holds the same tensor, and stands for it where tensors are written."""

    def part(self, tensors: list[Tensor], rank: int, ranks: int) -> Tensor:
        """One tensor rank's parameter, from whole tensors; of an expert, its rows of them."""
        joined = self.join.join(tensors)
        if self.cut is not None:
            joined = joined.chunk(ranks, self.cut)[rank]
        inner = {Stacked, Grouped}
        return joined.flatten(0, 1) if type(self.join) in inner else joined

    def whole(self, parameters: list[Tensor]) -> list[Tensor]:
        """Whole tensors, from the parameters of all tensor ranks (or one, where all have the same)."""
        if self.cut is None:
            return self.join.split(self.join.unfold(parameters[0], 1))
        parts = [self.join.unfold(item, len(parameters)) for item in parameters]
        return self.join.split(torch.cat(parts, self.cut))
