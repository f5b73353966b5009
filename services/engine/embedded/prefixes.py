"""Prompts whose keys and values are stored once and read by several rows.

A slot holds one prompt and has LANES lanes, one a row. The number of lanes is fixed, so that the matrix product of a
slot's queries with its keys has one shape, whatever the engine runs: a row's result cannot depend on its neighbours.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

LANES = 8


@dataclass(frozen=True)
class Fill:
    """A slot to be filled: by computing the prompt, or by copying it from another slot."""

    slot: int
    token_ids: list[int]
    source: int | None = None


@dataclass(eq=False)
class _Slot:
    key: tuple[int, tuple[int, ...]]
    free: list[int] = field(default_factory=lambda: list(range(LANES)))


class PrefixTable:
    """Which slot holds which prompt, and which lanes are taken. The lowest free slot is taken first."""

    def __init__(self, num_slots: int) -> None:
        self._slots: list[_Slot | None] = [None] * num_slots
        self._free = list(range(num_slots))
        self._by_key: dict[tuple[int, tuple[int, ...]], list[int]] = {}

    @property
    def num_used(self) -> int:
        return len(self._slots) - len(self._free)

    @property
    def extent(self) -> int:
        """One more than the highest slot in use."""
        return next((i + 1 for i in range(len(self._slots) - 1, -1, -1) if self._slots[i] is not None), 0)

    def length(self, slot: int) -> int:
        """Tokens of the prompt in a slot; 0 for an empty slot."""
        item = self._slots[slot]
        return len(item.key[1]) if item is not None else 0

    def place(
        self, token_ids: Sequence[int], weight_version: int, count: int
    ) -> tuple[list[Fill], list[tuple[int, int]]]:
        """Lanes (slot, lane) for `count` rows of one prompt, and the slots that must be filled for them, in order."""
        key = (weight_version, tuple(token_ids))
        fills: list[Fill] = []
        lanes: list[tuple[int, int]] = []
        slots = self._by_key.setdefault(key, [])
        for slot in [*slots, *([-1] * count)]:
            if len(lanes) == count:
                break
            if slot < 0:
                slot = heapq.heappop(self._free)
                source = slots[0] if slots else None
                self._slots[slot] = _Slot(key)
                slots.append(slot)
                fills.append(Fill(slot, list(token_ids), source))
            item = self._slots[slot]
            assert item is not None
            while item.free and len(lanes) < count:
                lanes.append((slot, item.free.pop(0)))
        return fills, lanes

    def release(self, slot: int, lane: int) -> None:
        """Free a lane; the last one frees the slot."""
        item = self._slots[slot]
        assert item is not None
        heapq.heappush(item.free, lane)
        if len(item.free) == LANES:
            self._slots[slot] = None
            heapq.heappush(self._free, slot)
            slots = self._by_key[item.key]
            slots.remove(slot)
            if not slots:
                del self._by_key[item.key]

    def compaction(self) -> list[tuple[int, int]]:
        """Moves (from slot, to slot) that bring the used slots together, once a quarter of the extent is empty."""
        used, extent = self.num_used, self.extent
        if extent - used <= max(2, used // 4):
            return []
        moves = []
        while self._free and self._free[0] < (source := self.extent - 1):
            target = heapq.heappop(self._free)
            item = self._slots[source]
            assert item is not None
            self._slots[target], self._slots[source] = item, None
            heapq.heappush(self._free, source)
            slots = self._by_key[item.key]
            slots[slots.index(source)] = target
            moves.append((source, target))
        return moves
