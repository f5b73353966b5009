"""Who runs and who waits: admission in order, siblings together, prompts shared. Pure bookkeeping, no tensors."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from services.engine.embedded.prefixes import Fill, PrefixTable
from services.engine.embedded.stop import StopWatch
from services.engine.generation import Finish, FinishReason, Request


@dataclass(eq=False)
class Sequence:
    """One sample being generated."""

    ticket: Ticket
    index: int
    seed: int
    watch: StopWatch
    generated: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top_token_ids: list[list[int]] = field(default_factory=list)
    top_logprobs: list[list[float]] = field(default_factory=list)
    routing: list[np.ndarray] = field(default_factory=list)
    """Parts [n, num_moe_layers, top_k] that were not given out yet, of each token when it was first read."""
    num_routed: int = 0
    """Rows so far, given out ones included."""
    num_sent: int = 0
    num_cached: int = 0
    slot: int = -1
    lane: int = -1
    own_length: int = 0
    """Tokens whose keys and values stand in the row's own part of the cache."""
    finish: Finish | None = None

    @property
    def position(self) -> int:
        """Absolute position of the next token: prompt plus what was generated."""
        return len(self.ticket.request.prompt) + len(self.generated)

    def add_routing(self, rows: np.ndarray) -> None:
        """Append rows of the next tokens; views of them are kept."""
        if len(rows):
            self.routing.append(rows)
            self.num_routed += len(rows)

    def unsent_routing(self) -> np.ndarray | None:
        """Rows that were not given out yet, None when there are none; they are forgotten here."""
        parts, self.routing = self.routing, []
        return np.concatenate(parts) if parts else None

    def context(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.ticket.prompt_ids, *self.generated]

    def end(self, reason: FinishReason, matched_stop: str = "") -> None:
        self.finish = Finish(reason, matched_stop, self.num_cached, len(self.generated))


@dataclass(eq=False)
class Ticket:
    """One request in the engine."""

    request: Request
    waiting: deque[Sequence] = field(default_factory=deque)
    num_open: int = 0
    """Samples that have not finished."""
    admitted_time: float | None = None
    prompt_ids: list[int] = field(default_factory=list)


def open_ticket(request: Request, make_watch: Callable[[Request], StopWatch]) -> Ticket:
    """A ticket whose samples all wait."""
    ticket = Ticket(request, num_open=len(request.seeds), prompt_ids=request.prompt.tolist())
    ticket.waiting.extend(Sequence(ticket, i, seed, make_watch(request)) for i, seed in enumerate(request.seeds))
    return ticket


@dataclass
class Admission:
    """Sequences that start now, and the prompt slots that must be filled first."""

    sequences: list[Sequence] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)


class Scheduler:
    """The queue, and the rows that are decoded: `running[i]` is row i, without holes."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.waiting: deque[Ticket] = deque()
        self.retracted: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.prefixes = PrefixTable(capacity)

    def submit(self, ticket: Ticket) -> None:
        self.waiting.append(ticket)

    def admit(self, weight_version: int, allow: Callable[[Request], bool] = lambda request: True) -> Admission:
        """Take what fits from the queue, in order. Siblings start together, unless they outnumber the rows."""
        admission = Admission()
        free = self.capacity - len(self.running)
        while self.retracted and free:
            sequence = self.retracted.popleft()
            self._place([sequence], sequence.context(), weight_version, admission)
            free -= 1
        while self.waiting and free and not self.retracted:
            ticket = self.waiting[0]
            wanted = min(len(ticket.waiting), self.capacity)
            if wanted > free or not allow(ticket.request):
                break
            chosen = [ticket.waiting.popleft() for _ in range(wanted)]
            ticket.admitted_time = ticket.admitted_time or time.time()
            self._place(chosen, ticket.prompt_ids, weight_version, admission)
            free -= wanted
            if not ticket.waiting:
                self.waiting.popleft()
        return admission

    def start(self, sequence: Sequence) -> None:
        """Give an admitted sequence the next row."""
        self.running.append(sequence)

    def release(self, sequence: Sequence) -> None:
        """Free the prompt lane of a sequence that ends or is retracted."""
        if sequence.slot >= 0:
            self.prefixes.release(sequence.slot, sequence.lane)
            sequence.slot = sequence.lane = -1

    def drop_rows(self, rows: list[int]) -> list[tuple[int, int, int]]:
        """Take rows out and close the holes; the moves (from row, to row, length) to be made in the cache, in order."""
        moves = []
        for row in sorted(rows, reverse=True):
            last = len(self.running) - 1
            self.release(self.running[row])
            if row != last:
                self.running[row] = self.running[last]
                moves.append((last, row, self.running[row].own_length))
            self.running.pop()
        return moves

    def retract_all(self) -> int:
        """Send every running sequence back to the head of the queue; its keys and values are computed again."""
        for sequence in reversed(self.running):
            self.release(sequence)
            sequence.own_length = 0
            self.retracted.appendleft(sequence)
        count = len(self.running)
        self.running.clear()
        return count

    def remove_waiting(self, chosen: Callable[[Ticket], bool]) -> list[Sequence]:
        """Take the sequences of chosen requests out of the queue."""
        removed: list[Sequence] = []
        for ticket in self.waiting:
            if chosen(ticket):
                removed.extend(ticket.waiting)
                ticket.waiting.clear()
        self.waiting = deque(ticket for ticket in self.waiting if ticket.waiting)
        return removed

    def remove_retracted(self, chosen: Callable[[Ticket], bool]) -> list[Sequence]:
        """Take retracted sequences of chosen requests out."""
        removed = [item for item in self.retracted if chosen(item.ticket)]
        self.retracted = deque(item for item in self.retracted if not chosen(item.ticket))
        return removed

    def _place(self, sequences: list[Sequence], context: list[int], weight_version: int, admission: Admission) -> None:
        fills, lanes = self.prefixes.place(context, weight_version, len(sequences))
        computed = any(fill.source is None for fill in fills)
        for position, (sequence, (slot, lane)) in enumerate(zip(sequences, lanes, strict=True)):
            sequence.slot, sequence.lane = slot, lane
            if not sequence.generated:
                sequence.num_cached = 0 if computed and position == 0 else len(context)
        admission.fills.extend(fills)
        admission.sequences.extend(sequences)
