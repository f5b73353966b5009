"""The one thread that does all torch work: commands, weight swaps, admission, prefill, decode, output, again."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from paceline.rpc import errors
from services.engine.embedded.decoder import Decoder
from services.engine.embedded.rate import Rate
from services.engine.embedded.sampler import Drawn
from services.engine.embedded.scheduler import Scheduler, Sequence, Ticket
from services.engine.generation import PauseMode, Piece, Request, check_gate

log = logging.getLogger(__name__)


def _promise() -> Future[Any]:
    """A future that only the decode thread ends: a waiter that gives up must not cancel it under the thread's hands."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


@dataclass
class Event:
    """What happened to a request: it left the queue, has pieces, or ended with an error."""

    ticket: Ticket
    pieces: list[Piece] = field(default_factory=list)
    admitted: bool = False
    error: errors.PacelineError | None = None
    closed: bool = False
    """Nothing follows."""


@dataclass
class _Pause:
    mode: PauseMode
    deadline: float
    held: Future[int]


@dataclass
class _Swap:
    weight_version: int
    mode: PauseMode
    install: Callable[[], None]
    done: Future[float]
    deadline: float
    held_since: float | None = None


class DecodeLoop:
    """Owns scheduler and decoder. Other threads call `post` and `swap`; `emit` is called in this thread."""

    def __init__(self, decoder: Decoder, capacity: int, emit: Callable[[list[Event]], None]) -> None:
        self.scheduler = Scheduler(capacity)
        self.rate = Rate()
        self.weight_version = 0
        self.num_generated = 0
        """Tokens since the start."""
        self.busy_seconds = 0.0
        """Time spent in prefill and decode since the start."""
        self._decoder = decoder
        self._emit = emit
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pause: _Pause | None = None
        self._swap: _Swap | None = None
        self._events: dict[Ticket, Event] = {}
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self.ended: Future[None] = _promise()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the step it is in."""
        self._commands.put(None)
        self._thread.join(30)

    def post(self, work: Callable[[], Any]) -> Future[Any]:
        """Run `work` in the thread, between two steps."""
        future: Future[Any] = _promise()

        def run() -> None:
            try:
                future.set_result(work())
            except errors.PacelineError as error:
                future.set_exception(error)
            except BaseException as error:
                future.set_exception(error)
                raise

        self._commands.put(run)
        return future

    def submit(self, ticket: Ticket) -> None:
        self.post(lambda: self.scheduler.submit(ticket))

    def held_by(self) -> str:
        """What keeps requests from going on, for a person; any thread may ask."""
        pause, swap = self._pause, self._swap
        if pause is not None:
            return (
                f"Resume, or the end of the pause ({pause.mode}) in {max(0.0, pause.deadline - time.monotonic()):.0f} s"
            )
        if swap is not None:
            return f"weight version {swap.weight_version} ({swap.mode})"
        return ""

    def abort(self, request_ids: Iterable[str] | None) -> int:
        """In the thread: end requests (None: all), each sample with what it has; how many samples."""
        wanted = None if request_ids is None else set(request_ids)
        return self._end(lambda ticket: wanted is None or ticket.request.request_id in wanted, waiting=True)

    def cancel(self, ticket: Ticket) -> None:
        """In the thread: drop a request whose caller is gone."""
        self._end(lambda item: item is ticket, waiting=True)

    def pause(self, mode: PauseMode, seconds: float) -> Future[int]:
        """Hold generation. The future has the number of samples held, once none is being computed in mode drain."""
        held: Future[int] = _promise()

        def begin() -> None:
            self._resolve_pause()
            self._pause = _Pause(mode, time.monotonic() + seconds, held)
            if mode == "abort":
                self._end(lambda ticket: True, waiting=False)
            if mode == "retract":
                self.scheduler.retract_all()
            if mode != "drain":
                held.set_result(len(self.scheduler.running) + len(self.scheduler.retracted))

        self._commands.put(begin)
        return held

    def resume(self) -> None:
        """In the thread: end the pause."""
        self._resolve_pause()

    def swap(self, weight_version: int, mode: PauseMode, install: Callable[[], None], seconds: float) -> Future[float]:
        """Run `install` when no token may come of the version before; the future has the seconds requests were held.

        Requests that ask for exactly the version before are waited for, whatever the mode; after `seconds` they end.
        """
        done: Future[float] = _promise()

        def begin() -> None:
            self._swap = _Swap(weight_version, mode, install, done, time.monotonic() + seconds)

        self._commands.put(begin)
        return done

    def _run(self) -> None:
        try:
            while self._take_commands():
                self._end_pause_on_time()
                self._try_swap()
                if not self._holds():
                    self._compute()
                self._flush()
        except Exception as error:
            log.exception("the decode thread failed")
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    def _compute(self) -> None:
        before, began = self.num_generated, time.monotonic()
        self._admit()
        self._decode()
        if self.num_generated > before:
            self.busy_seconds += time.monotonic() - began

    def _take_commands(self) -> bool:
        """Run what is posted, waiting for something while there is nothing to do. False to end."""
        block = not self._has_work()
        while True:
            try:
                command = self._commands.get(block, self._patience() if block else None)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            block = False

    def _has_work(self) -> bool:
        if self._swap is not None and not self._blockers(self._swap):
            return True
        if self._holds():
            return False
        waits = self.scheduler.retracted or (self.scheduler.waiting and self._admits())
        return bool(self.scheduler.running or waits or self._draining())

    def _patience(self) -> float | None:
        times = [item.deadline for item in (self._pause, self._swap) if item is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _holds(self) -> bool:
        """Whether decode stands still."""
        return self._pause is not None and self._pause.mode != "drain"

    def _draining(self) -> bool:
        return self._pause is not None and self._pause.mode == "drain" and not self._pause.held.done()

    def _admits(self) -> bool:
        draining = self._swap is not None and self._swap.mode in ("drain", "abort")
        return self._pause is None and not draining

    def _end_pause_on_time(self) -> None:
        if self._draining() and self._pause is not None and not self.scheduler.running:
            self._pause.held.set_result(0)
        if self._pause is not None and time.monotonic() >= self._pause.deadline:
            log.warning("pause (%s) ended by its deadline", self._pause.mode)
            self._resolve_pause()

    def _resolve_pause(self) -> None:
        if self._pause is not None and not self._pause.held.done():
            self._pause.held.set_result(len(self.scheduler.running))
        self._pause = None

    def _blockers(self, swap: _Swap) -> list[Sequence]:
        """Running samples that a swap has to wait for."""
        if swap.mode == "drain":
            return self.scheduler.running
        live = (*self.scheduler.running, *self.scheduler.retracted)
        return [item for item in live if item.ticket.request.exact_version is not None]

    def _try_swap(self) -> None:
        swap = self._swap
        if swap is None:
            return
        if swap.mode == "abort":
            self._end(lambda ticket: True, waiting=False)
        if swap.mode == "drain" and swap.held_since is None:
            swap.held_since = time.monotonic()
        if self._blockers(swap):
            if time.monotonic() < swap.deadline:
                return
            held = {item.ticket for item in self._blockers(swap)}
            log.warning("weight version %d: %d requests ended at the deadline", swap.weight_version, len(held))
            self._end(lambda ticket: ticket in held, waiting=False)
        self._swap = None
        began = swap.held_since or time.monotonic()
        try:
            swap.install()
        except errors.PacelineError as error:
            swap.done.set_exception(error)
            return
        except BaseException as error:
            swap.done.set_exception(error)
            raise
        self.weight_version = swap.weight_version
        if swap.mode == "retract":
            self.scheduler.retract_all()
        self._refuse_left()
        swap.done.set_result(time.monotonic() - began)

    def _refuse_left(self) -> None:
        """End waiting requests whose exact version was left."""
        for ticket in [item for item in self.scheduler.waiting if item.request.exact_version is not None]:
            try:
                check_gate(ticket.request, self.weight_version)
            except errors.PacelineError as error:
                self._fail(ticket, error)

    def _fail(self, ticket: Ticket, error: errors.PacelineError) -> None:
        self.scheduler.remove_waiting(lambda item: item is ticket)
        self.scheduler.remove_retracted(lambda item: item is ticket)
        self._drop([row for row, item in enumerate(self.scheduler.running) if item.ticket is ticket])
        ticket.num_open = 0
        self._event(ticket).error = error

    def _may_start(self, request: Request) -> bool:
        """While a swap waits, requests tied to the version before must not make it wait longer."""
        return self._swap is None or request.exact_version is None

    def _admit(self) -> None:
        scheduler = self.scheduler
        if not self._admits() or not (scheduler.waiting or scheduler.retracted):
            return
        for source, target in scheduler.prefixes.compaction():
            for item in scheduler.running:
                if item.slot == source:
                    item.slot = target
            self._decoder.move_slot(source, target, scheduler.prefixes.length(target))
        admission = scheduler.admit(self.weight_version, self._may_start)
        if not admission.sequences:
            return
        for item in admission.sequences:
            if not item.generated:
                self._event(item.ticket).admitted = True
        self._decoder.fill(admission.fills)
        drawn = self._decoder.draw_first(admission.sequences)
        self._take(admission.sequences, drawn)
        for item in admission.sequences:
            if item.finish is None:
                scheduler.start(item)
            else:
                scheduler.release(item)

    def _decode(self) -> None:
        running = self.scheduler.running
        if not running:
            return
        self._take(running, self._decoder.step(running, self.scheduler.prefixes))
        self._drop([row for row, item in enumerate(running) if item.finish is not None])

    def _drop(self, rows: list[int]) -> None:
        for source, target, length in self.scheduler.drop_rows(rows):
            self._decoder.cache.move_own(source, target, length)

    def _take(self, sequences: SequenceOf[Sequence], drawn: Drawn) -> None:
        """Append a drawn token to each sequence, and see which of them end."""
        tokens, logprobs = drawn.tokens.tolist(), drawn.logprobs.tolist()
        top = (
            (drawn.top_tokens.tolist(), drawn.top_logprobs.tolist())
            if drawn.top_tokens is not None and drawn.top_logprobs is not None
            else None
        )
        for row, item in enumerate(sequences):
            item.generated.append(tokens[row])
            item.logprobs.append(logprobs[row])
            item.versions.append(self.weight_version)
            wanted = item.ticket.request.num_top_logprobs
            if wanted and top is not None:
                item.top_token_ids.append(top[0][row][:wanted])
                item.top_logprobs.append(top[1][row][:wanted])
            ended = item.watch.add(tokens[row], len(item.generated))
            if ended is not None:
                item.end(*ended)
            if ended is not None or item.ticket.request.stream:
                self._output(item)
        self.rate.add(len(sequences))
        self.num_generated += len(sequences)

    def _output(self, item: Sequence) -> None:
        since = item.num_sent
        item.num_sent = len(item.generated)
        routing = item.unsent_routing() if item.ticket.request.with_routing else None
        piece = Piece(
            item.index, item.generated[since:], item.logprobs[since:], item.versions[since:],
            item.watch.take_text(last=item.finish is not None), item.top_token_ids[since:], item.top_logprobs[since:],
            item.finish, routing,
        )  # fmt: skip
        self._event(item.ticket).pieces.append(piece)
        if item.finish is not None:
            item.ticket.num_open -= 1

    def _end(self, chosen: Callable[[Ticket], bool], waiting: bool) -> int:
        """End running samples of chosen requests, and waiting ones too, with reason abort."""
        rows = [row for row, item in enumerate(self.scheduler.running) if chosen(item.ticket)]
        ended = [self.scheduler.running[row] for row in rows]
        self._drop(rows)
        ended += self.scheduler.remove_retracted(chosen)
        if waiting:
            ended += self.scheduler.remove_waiting(chosen)
        for item in ended:
            item.end("abort")
            self._output(item)
        return len(ended)

    def _event(self, ticket: Ticket) -> Event:
        return self._events.setdefault(ticket, Event(ticket))

    def _flush(self) -> None:
        if self._events:
            events, self._events = list(self._events.values()), {}
            for event in events:
                event.closed = event.ticket.num_open == 0
            self._emit(events)
