"""What the ledger says about prompts: the account of a run, one group's record, and its history."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

IN_FLIGHT = ("waiting", "generating", "buffered", "claimed")
STATES = (*IN_FLIGHT, "trained", "committed", "dropped", "dead")
"""Where a prompt can be. `waiting`: issued and not leased; `committed`: trained by a step that is in a checkpoint."""


@dataclass(frozen=True)
class Issue:
    """A group handed to a producer. `attempt` counts from 1; results of an earlier attempt are refused."""

    group_id: str
    attempt: int


@dataclass(frozen=True)
class Event:
    """A group entered a state. `time` is Unix seconds."""

    time: float
    state: str
    detail: str


@dataclass(frozen=True)
class GroupRecord:
    """What the ledger holds about one group. `failures` are failed attempts, `refusals` stale results."""

    group_id: str
    state: str
    attempt: int
    failures: int
    owner: str
    step: int
    oldest_version: int
    refusals: int
    history: tuple[Event, ...]

    @classmethod
    def parse(cls, group_id: str, text: str) -> GroupRecord:
        """From the hash value that lua/prelude.lua writes: a JSON header, then one line an event."""
        header, *lines = text.split("\n")
        state, attempt, failures, owner, step, _, version, _, refusals = json.loads(header)
        events = []
        for line in lines:
            time, reached, detail = line.split(" ", 2)
            events.append(Event(int(time) / 1000, reached, detail))
        return cls(group_id, state, attempt, failures, owner, step, version, refusals, tuple(events))

    @property
    def detail(self) -> str:
        """Why the group is where it is: the error of a dead group, the reason of a dropped one."""
        return self.history[-1].detail if self.history else ""


@dataclass(frozen=True)
class Account:
    """What became of every prompt that was issued, in groups.

    `trained` includes `committed`, the part that a durable checkpoint contains. `recount` holds the same counts made
    anew from the records (and `stream`, the entries of the sample stream) when it was asked for.
    """

    issued: int
    waiting: int
    generating: int
    buffered: int
    claimed: int
    trained: int
    committed: int
    dropped: Mapping[str, int]
    dead: int
    refused_stale: int
    cursor: int
    dataset_size: int
    epochs: int
    committed_step: int = 0
    recount: Mapping[str, int] | None = field(default=None, compare=False)

    @classmethod
    def parse(cls, meta: Mapping[str, str], recount: Mapping[str, int] | None = None) -> Account:
        """From the `meta` hash of the ledger."""

        def number(name: str) -> int:
            return int(meta.get(name, 0))

        committed = number("n:committed")
        dropped = {k.removeprefix("dropped:"): int(v) for k, v in sorted(meta.items()) if k.startswith("dropped:")}
        return cls(
            issued=number("issued"), waiting=number("n:waiting"), generating=number("n:generating"),
            buffered=number("n:buffered"), claimed=number("n:claimed"), trained=number("n:trained") + committed,
            committed=committed, dropped=dropped, dead=number("n:dead"), refused_stale=number("refused_stale"),
            cursor=number("cursor"), dataset_size=number("dataset_size"), epochs=number("epochs"),
            committed_step=number("committed_step"), recount=recount,
        )  # fmt: skip

    @property
    def in_flight(self) -> int:
        """Issued groups whose fate is open."""
        return self.waiting + self.generating + self.buffered + self.claimed

    @property
    def total(self) -> int:
        """Groups of the whole run: dataset_size * epochs."""
        return self.dataset_size * self.epochs

    @property
    def exhausted(self) -> bool:
        """No group will be put any more: the data is used up and nothing waits or is being generated."""
        return self.cursor >= self.total and self.waiting == 0 and self.generating == 0

    @property
    def imbalances(self) -> list[str]:
        """What does not add up, in words; empty when the account balances."""
        found = []
        accounted = self.trained + sum(self.dropped.values()) + self.dead + self.in_flight
        if self.issued != accounted:
            found.append(f"issued is {self.issued}, but trained + dropped + dead + in flight is {accounted}")
        if self.issued != self.cursor:
            found.append(f"issued is {self.issued}, but the data cursor is {self.cursor}")
        if self.recount is not None:
            found.extend(self._recount_faults(self.recount))
        return found

    @property
    def balanced(self) -> bool:
        """Issued = trained + dropped + dead + in flight; after a recount also that every counter equals it."""
        return not self.imbalances

    def summary(self) -> dict[str, Any]:
        """Every number, also the derived ones, as JSON values: for what shows or stores an account."""
        counts = {item.name: getattr(self, item.name) for item in fields(self) if item.compare}
        derived = {name: getattr(self, name) for name in ("total", "in_flight", "exhausted", "balanced", "imbalances")}
        return {**counts, **derived, "dropped": dict(self.dropped)}

    def _recount_faults(self, recount: Mapping[str, int]) -> list[str]:
        counters = {f"n:{state}": getattr(self, state) for state in (*IN_FLIGHT, "committed", "dead")}
        counters["n:trained"] = self.trained - self.committed
        counters.update({f"dropped:{reason}": count for reason, count in self.dropped.items()})
        counters["stream"] = self.buffered + self.claimed + self.trained - self.committed
        names = sorted(counters.keys() | recount.keys())
        return [
            f"counter {name} is {counters.get(name, 0)}, the records say {recount.get(name, 0)}"
            for name in names
            if counters.get(name, 0) != recount.get(name, 0)
        ]
