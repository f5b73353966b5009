"""From a group id to its prompt: the order of the data in an epoch."""

from __future__ import annotations

import hashlib

from paceline.config.data import DataConfig
from paceline.ids import GroupId
from services.rollout.sources.base import Prompt, Source


class DataOrder:
    """Which prompt a group is made of. The order depends on the seed alone, not on a library's random generator."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation: list[int] = []

    def source_index(self, group: GroupId) -> int:
        """Index in the source of a group. IndexError when the group lies beyond the data."""
        if group.index >= self._size:
            raise IndexError(f"group {group} lies beyond the data of {self._size} prompts")
        if not self._shuffle:
            return group.index
        if group.epoch != self._epoch:
            self._permutation = permutation(self._size, self._seed + group.epoch)
            self._epoch = group.epoch
        return self._permutation[group.index]


def permutation(size: int, seed: int) -> list[int]:
    """An order of range(size) by the hashes of its members: equal in every version of Python and on every machine."""
    return sorted(range(size), key=lambda item: hashlib.sha256(f"{seed}/{item}".encode()).digest())


class Dataset:
    """Prompts by group id."""

    def __init__(self, source: Source, data: DataConfig, seed: int) -> None:
        self._source = source
        self._order = DataOrder(len(source), seed, data.shuffle)
        self.epochs = data.epochs

    def __len__(self) -> int:
        return len(self._source)

    def prompt(self, group_id: str) -> Prompt:
        """The prompt of a group, the same in every attempt."""
        return self._source[self._order.source_index(GroupId.parse(group_id))]
