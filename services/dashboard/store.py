"""The one writer of telemetry.sqlite: a thread that commits in batches, fed by queues that never make a sender wait."""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.dashboard import spans as span_rows
from services.dashboard.schema import open_writer

log = logging.getLogger(__name__)

PENDING_SPANS = 50_000
PENDING_BYTES = 64 * 2**20
KEEP_SPANS = 500_000
KEEP_ACCOUNTS = 20_000
KEEP_SAMPLES = 100_000
_BATCH_SECONDS = 0.2
_PRUNE_EVERY = 5_000
_PRUNE_SECONDS = 300.0

Work = Callable[[sqlite3.Connection], object]


@dataclass(frozen=True)
class StepRow:
    """One record of a step, as the coordinator holds it."""

    kind: str
    name: str
    step: int
    time: float
    weight_version: int
    trace_id: str
    values: dict[str, float]
    group_ids: list[str]


@dataclass(frozen=True)
class FleetSample:
    """What all engines together did since the sample before."""

    time: float
    engines: int
    busy: float
    """Engines times the part of the time that they decoded."""
    running: int
    waiting: int
    tokens_per_second: float


@dataclass
class Counters:
    """What came in and what was lost, since the start of this process."""

    spans_received: int = 0
    spans_stored: int = 0
    spans_dropped: int = 0
    spans_pending: int = 0
    error: str = ""
    """Why the last write failed; empty when it did not."""


@dataclass
class _Order:
    work: Work
    done: asyncio.Future[None] | None = None
    loop: asyncio.AbstractEventLoop | None = None


@dataclass
class Store:
    """Writes from a thread of its own. Read with `queries.Reader`, from any process.

    put_spans refuses, and counts, what does not fit into PENDING_SPANS and PENDING_BYTES; the other writes are awaited.
    """

    path: Path
    run_id: str
    keep_spans: int = KEEP_SPANS
    pending_spans: int = PENDING_SPANS
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self._connection = open_writer(self.path, self.run_id)
        self._queue: queue.SimpleQueue[ExportTraceServiceRequest | _Order | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._pending_bytes = 0
        self._since_prune = 0
        self._pruned = time.monotonic()
        self._thread = threading.Thread(target=self._write, name="store", daemon=True)
        self._thread.start()

    def put_spans(self, request: ExportTraceServiceRequest) -> int:
        """Queue a request's spans; the number that was refused (all of them or none). Never blocks."""
        number, size = span_rows.count(request), request.ByteSize()
        with self._lock:
            self.counters.spans_received += number
            full = self.counters.spans_pending + number > self.pending_spans
            if full or self._pending_bytes + size > PENDING_BYTES:
                self.counters.spans_dropped += number
                return number
            self.counters.spans_pending += number
            self._pending_bytes += size
        self._queue.put(request)
        return 0

    async def put_steps(self, rows: list[StepRow]) -> None:
        """Store records. One that is there already changes nothing; another replaces it, under a new revision."""
        await self._do(lambda connection: _put_steps(connection, rows))

    async def put_account(self, at: float, body: str) -> None:
        """Append the ledger account, as JSON, to its history."""
        await self._do(
            lambda connection: connection.execute("INSERT OR REPLACE INTO accounts VALUES (?, ?)", (at, body))
        )

    async def put_sample(self, sample: FleetSample) -> None:
        """Append what the engines do now."""
        row = (sample.time, sample.engines, sample.busy, sample.running, sample.waiting, sample.tokens_per_second)
        sql = "INSERT OR REPLACE INTO fleet_samples VALUES (?, ?, ?, ?, ?, ?)"
        await self._do(lambda connection: connection.execute(sql, row))

    async def put_snapshot(self, name: str, body: str) -> None:
        """Replace the newest state of something: run, fleet."""
        sql = "INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?)"
        await self._do(lambda connection: connection.execute(sql, (name, time.time(), body)))

    async def flush(self) -> None:
        """Wait until what was queued before is committed."""
        await self._do(lambda connection: None)

    async def close(self) -> None:
        """Commit what is queued and close the file."""
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join, 10)

    async def _do(self, work: Work) -> None:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._queue.put(_Order(work, done, loop))
        async with asyncio.timeout(30):
            await done

    def _write(self) -> None:
        """The thread: one transaction for everything that came within a short time."""
        going_on = True
        while going_on:
            batch = [self._queue.get()]
            deadline = time.monotonic() + _BATCH_SECONDS
            while batch[-1] is not None and not isinstance(batch[-1], _Order):
                try:
                    batch.append(self._queue.get(timeout=max(0.0, deadline - time.monotonic())))
                except queue.Empty:
                    break
            while batch[-1] is not None and not self._queue.empty():
                batch.append(self._queue.get())
            going_on = batch[-1] is not None
            self._commit([item for item in batch if item is not None])
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._connection.close()

    def _commit(self, batch: list[ExportTraceServiceRequest | _Order]) -> None:
        requests = [item for item in batch if not isinstance(item, _Order)]
        orders = [item for item in batch if isinstance(item, _Order)]
        number = sum(map(span_rows.count, requests))
        failure: sqlite3.Error | None = None
        try:
            with self._connection as connection:
                for request in requests:
                    connection.executemany(span_rows.INSERT, span_rows.rows(request))
                for order in orders:
                    order.work(connection)
                self._prune(connection, number)
        except sqlite3.Error as error:
            failure = error
        with self._lock:
            if failure is not None and str(failure) != self.counters.error:
                log.error("telemetry is not stored: %s (%s); is the disk full?", failure, self.path)
            self.counters.error = str(failure) if failure is not None else ""
            self.counters.spans_pending -= number
            self._pending_bytes -= sum(request.ByteSize() for request in requests)
            if failure is None:
                self.counters.spans_stored += number
            else:
                self.counters.spans_dropped += number
        for order in orders:
            _finish(order, failure)

    def _prune(self, connection: sqlite3.Connection, number: int) -> None:
        self._since_prune += number
        if self._since_prune >= min(_PRUNE_EVERY, self.keep_spans):
            self._since_prune = 0
            newest = connection.execute("SELECT max(id) FROM spans").fetchone()[0] or 0
            connection.execute("DELETE FROM spans WHERE id <= ?", (newest - self.keep_spans,))
        if time.monotonic() - self._pruned > _PRUNE_SECONDS:
            self._pruned = time.monotonic()
            for table, keep in (("accounts", KEEP_ACCOUNTS), ("fleet_samples", KEEP_SAMPLES)):
                oldest = f"SELECT time FROM {table} ORDER BY time DESC LIMIT 1 OFFSET ?"
                connection.execute(f"DELETE FROM {table} WHERE time <= ({oldest})", (keep,))


def _finish(order: _Order, failure: Exception | None) -> None:
    done, loop = order.done, order.loop
    if done is None or loop is None or loop.is_closed():
        return

    def settle() -> None:
        if done.done():
            return
        if failure is not None:
            done.set_exception(failure)
        else:
            done.set_result(None)

    loop.call_soon_threadsafe(settle)


def _put_steps(connection: sqlite3.Connection, rows: list[StepRow]) -> None:
    revision = connection.execute("SELECT coalesce(max(revision), 0) FROM steps").fetchone()[0]
    for row in rows:
        key = (row.kind, row.name, row.step)
        values = json.dumps(row.values, sort_keys=True)
        body = (row.time, row.weight_version, row.trace_id, values, json.dumps(row.group_ids))
        found = connection.execute(
            "SELECT time, weight_version, trace_id, value_json, group_json FROM steps"
            " WHERE kind = ? AND name = ? AND step = ?",
            key,
        ).fetchone()
        if found is not None and tuple(found) == body:
            continue
        revision += 1
        connection.execute("INSERT OR REPLACE INTO steps VALUES (?,?,?,?,?,?,?,?,?)", (*key, revision, *body))
