"""Grader processes under limits: a slot each, a warm spare, and a bounded queue before them.

Threads and coroutines cannot stop Python code that loops; a process can be killed. A timeout here costs its own sample,
never the batch, and the spare takes over while a replacement starts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from paceline.config.services import RewardConfig
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard
from services.reward.loading import GraderRefused
from services.reward.process import WorkerEnded, WorkerProcess

log = logging.getLogger(__name__)

_BACKOFF_SECONDS = (0.1, 5.0)
_STOPPING = "the reward service is stopping; try again"


@dataclass(frozen=True)
class Outcome:
    """A value, or the reason (a name of MissingReason) and detail of its absence, and how long it took."""

    value: float | None = None
    missing: str = ""
    detail: str = ""
    seconds: float = 0.0


class Pool:
    """Runs tasks on `settings.workers` processes at once. `start` first; `run` replaces processes until cancelled."""

    def __init__(self, settings: RewardConfig, board: StatusBoard) -> None:
        self._settings = settings
        self._board = board
        self._slots = asyncio.Semaphore(settings.workers)
        self._ready: asyncio.Queue[WorkerProcess | None] = asyncio.Queue()
        self._lost: asyncio.Queue[None] = asyncio.Queue()
        self._workers: set[WorkerProcess] = set()
        self._ending: set[WorkerProcess] = set()
        self._graders: list[dict[str, Any]] = []
        self._admitted = self._queued = self._starved = self._busy = self._timeouts = self._restarts = 0
        self._seconds_per_task = 0.05
        self._closed = False

    @property
    def pids(self) -> list[int]:
        """Process ids of the workers, spare included."""
        return sorted(worker.pid for worker in self._workers if worker.alive)

    async def start(self, graders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Start all workers and the spare with `graders` loaded; returns what `load` does. GraderRefused as there."""
        self._graders = list(graders)
        count = self._settings.workers + 1
        results = await asyncio.gather(*(self._start_worker() for _ in range(count)), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                await self.close()
                raise result
        return await self.load(graders)

    async def run(self) -> None:
        """Start a process for each one that was lost."""
        async with asyncio.TaskGroup() as group:
            while True:
                await self._lost.get()
                group.create_task(self._replace())

    async def close(self) -> None:
        """Kill every worker. Tasks in progress and in the queue end with Unavailable."""
        self._closed = True
        self._ready.put_nowait(None)
        for worker in list(self._workers):
            self._discard(worker)
        await asyncio.gather(*(worker.ended() for worker in self._ending), return_exceptions=True)

    @contextmanager
    def admit(self, count: int) -> Iterator[None]:
        """Take room in the queue for `count` tasks of one call. ResourceExhausted when it is full."""
        room = self._settings.max_waiting + self._settings.workers
        if count > room:
            raise errors.InvalidArgument(
                f"the request is {count} tasks (items times graders), the queue holds {room}; send fewer items or "
                "raise reward.max_waiting"
            )
        if self._admitted + count > room:
            wait = self._admitted * self._seconds_per_task / self._settings.workers
            raise errors.ResourceExhausted(
                f"the queue holds {self._admitted} of {room} tasks and {count} more do not fit; try again later, add "
                "reward.workers or raise reward.max_waiting",
                min(max(wait, 0.1), 5.0),
            )
        self._admitted += count
        try:
            yield
        finally:
            self._admitted -= count

    async def load(self, graders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Load graders in a worker and return {name, required_metadata} of each. GraderRefused says what is wrong.

        WorkerEnded or TimeoutError when their code ends or holds up the process.
        """
        async with self._worker() as worker:
            return await worker.load(graders)

    async def grade(self, grader: dict[str, Any], item: dict[str, Any], limit: float) -> Outcome:
        """Grade one item by one grader within `limit` seconds. Never raises for what the grader does."""
        began = time.monotonic()
        try:
            async with self._worker() as worker:
                began = time.monotonic()
                reply = await worker.grade(grader, item, limit)
        except TimeoutError:
            self._timeouts += 1
            self._show()
            return Outcome(missing="TIMEOUT", detail=f"ran past {limit} s", seconds=time.monotonic() - began)
        except (WorkerEnded, GraderRefused) as error:
            return Outcome(missing="GRADER_ERROR", detail=str(error), seconds=time.monotonic() - began)
        self._seconds_per_task += 0.1 * (time.monotonic() - began - self._seconds_per_task)
        return Outcome(reply.get("value"), reply.get("missing", ""), reply.get("detail", ""), reply["seconds"])

    @asynccontextmanager
    async def _worker(self) -> AsyncIterator[WorkerProcess]:
        """A worker for one task, in its turn. Afterwards it is ready again, or killed: failed, cancelled, worn out."""
        self._queued += 1
        self._show()
        try:
            await self._slots.acquire()
        finally:
            self._queued -= 1
            self._show()
        try:
            worker = await self._take()
            self._busy += 1
            self._show()
            usable = False
            try:
                yield worker
                usable = not worker.worn_out
            except GraderRefused:
                usable = not worker.worn_out
                raise
            except WorkerEnded:
                if self._closed:
                    raise errors.Unavailable(_STOPPING, 0.5) from None
                raise
            finally:
                self._busy -= 1
                if usable:
                    self._ready.put_nowait(worker)
                else:
                    self._lose(worker)
                self._show()
        finally:
            self._slots.release()

    async def _take(self) -> WorkerProcess:
        """A live worker; waits for one to start when all are gone."""
        while True:
            if self._ready.empty():
                self._starved += 1
                self._show()
                try:
                    worker = await self._ready.get()
                finally:
                    self._starved -= 1
                    self._show()
            else:
                worker = self._ready.get_nowait()
            if worker is None or self._closed:
                self._ready.put_nowait(None)
                raise errors.Unavailable(_STOPPING, 0.5)
            if worker.alive:
                return worker
            self._lose(worker)

    def _lose(self, worker: WorkerProcess) -> None:
        self._discard(worker)
        if not self._closed:
            self._restarts += 1
            self._lost.put_nowait(None)

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._workers.discard(worker)
        self._ending.add(worker)
        worker.on_end(lambda: self._ending.discard(worker))

    async def _start_worker(self) -> None:
        """One more ready worker. TimeoutError, WorkerEnded or GraderRefused when it cannot load the graders."""
        worker = await WorkerProcess.start(self._settings.memory_mb)
        self._workers.add(worker)
        try:
            await worker.load(self._graders)
        except BaseException:
            self._discard(worker)
            raise
        self._ready.put_nowait(worker)
        self._show()

    async def _replace(self) -> None:
        delay, longest = _BACKOFF_SECONDS
        while not self._closed:
            try:
                return await self._start_worker()
            except (TimeoutError, WorkerEnded, GraderRefused, OSError) as error:
                log.error("a grader process did not start: %s", error or "it took too long")
                with self._board.activity("pool restart").waiting(f"a grader process that starts: {error}", delay):
                    await asyncio.sleep(delay)
                delay = min(delay * 2, longest)

    def _show(self) -> None:
        self._board.gauges.update(
            busy=self._busy, queued=self._queued, timeouts=self._timeouts, restarts=self._restarts
        )
        self._board.facts["worker_pids"] = " ".join(map(str, self.pids))
        self._show_activity()

    def _show_activity(self) -> None:
        """One line for all tasks: many wait at once, and the wait lasts from the first of them to the last."""
        workers, cause = self._settings.workers, ""
        if self._starved:
            cause = "a grader process to start"
        elif self._queued and self._slots.locked():
            cause = f"a free grader process: {self._queued} tasks queue for {workers} (reward.workers)"
        activity = self._board.activity("pool")
        since = activity.since if bool(cause) == bool(activity.waiting_for) else time.time()
        activity.set(f"grading {self._busy} at once" if self._busy else "idle")
        activity.waiting_for, activity.since = cause, since
