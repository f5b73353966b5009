"""What can be asked of telemetry.sqlite, with typed answers; the file alone is enough, of a live or a stopped run."""

from __future__ import annotations

import json
import math
import sqlite3
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from paceline.telemetry import names
from services.dashboard.schema import open_reader

MAX_POINTS = 2_000
MAX_SPANS = 600
_LEAST_WINDOW_SECONDS = 2.0
_STEP_COLUMNS = "kind, name, step, revision, time, weight_version, trace_id, value_json"


class StepView(BaseModel):
    """One step or evaluation; values that are not finite are None."""

    kind: str
    name: str
    step: int
    revision: int
    time: float
    weight_version: int
    trace_id: str
    values: dict[str, float | None]
    generated_tokens_per_second: float | None = None
    """Of all engines together, mean over the time of the step; None when nothing was sampled."""


class SpanView(BaseModel):
    """One span of a trace; times in seconds after the trace's first."""

    span_id: str
    parent_id: str
    depth: int
    service: str
    member: str
    name: str
    start: float
    duration: float
    error: str | None
    attributes: dict[str, Any]


class TraceView(BaseModel):
    """The spans of a group, parents before children, siblings by start."""

    group_id: str
    trace_ids: list[str]
    start_time: float
    duration: float
    num_spans: int
    spans: list[SpanView]
    """At most MAX_SPANS of them, the earliest."""


class TraceRow(BaseModel):
    """One traced group in a list."""

    group_id: str
    trace_id: str
    attempt: int | None
    start_time: float
    duration: float
    num_spans: int
    step: int | None
    """The step that trained it; None when none has."""
    errors: int


class AccountPoint(BaseModel):
    """The ledger account at a time."""

    time: float
    account: dict[str, Any]


class BusyView(BaseModel):
    """How busy the engines were in a window of time."""

    samples: int
    idle_share: float | None
    """Share of engine-seconds without a running or waiting request; None when too little was sampled."""
    tokens_per_second: float | None


class Reader:
    """Queries; each opens the file anew, so any thread may ask and a writer is never held up."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(open_reader(self.path)) as connection:
            yield connection

    def steps(self, after_revision: int = 0, limit: int = MAX_POINTS) -> list[StepView]:
        """Records newer than a revision, by step; more than `limit` training steps are thinned out, the last stays."""
        with self._open() as connection:
            rows = connection.execute(
                f"SELECT {_STEP_COLUMNS} FROM steps WHERE revision > ? ORDER BY step", (after_revision,)
            ).fetchall()
            training = [row for row in rows if row["kind"] == "train"]
            stride = max(1, math.ceil(len(training) / limit))
            kept = {row["revision"] for row in training[::-1][::stride]}
            views = [_step(row) for row in rows if row["kind"] != "train" or row["revision"] in kept]
            _add_generated(connection, views)
        return views

    def last_steps(self, count: int) -> list[StepView]:
        """The newest training steps, in order."""
        with self._open() as connection:
            rows = connection.execute(
                f"SELECT {_STEP_COLUMNS} FROM steps WHERE kind = 'train' ORDER BY step DESC LIMIT ?", (count,)
            ).fetchall()
        return [_step(row) for row in reversed(rows)]

    def revision(self) -> int:
        """The newest revision of a record; 0 when there is none."""
        with self._open() as connection:
            return connection.execute("SELECT coalesce(max(revision), 0) FROM steps").fetchone()[0]

    def busy(self, start: float, end: float) -> BusyView:
        """What the engines did between two Unix times."""
        with self._open() as connection:
            row = connection.execute(
                "SELECT count(*), sum(engines), sum(busy), avg(tokens_per_second) FROM fleet_samples"
                " WHERE time > ? AND time <= ? AND engines > 0",
                (start, end),
            ).fetchone()
        samples, engines, busy, rate = row
        share = 1 - busy / engines if samples >= 3 else None
        return BusyView(samples=samples, idle_share=share, tokens_per_second=rate)

    def accounts(self, limit: int = 500) -> list[AccountPoint]:
        """The history of the account, thinned out evenly to about `limit` points; the last stays."""
        with self._open() as connection:
            total = connection.execute("SELECT count(*) FROM accounts").fetchone()[0]
            stride = max(1, math.ceil(total / limit))
            rows = connection.execute(
                "SELECT time, body FROM (SELECT *, row_number() OVER (ORDER BY time DESC) - 1 AS n FROM accounts)"
                " WHERE n % ? = 0 ORDER BY time",
                (stride,),
            ).fetchall()
        return [AccountPoint(time=row["time"], account=json.loads(row["body"])) for row in rows]

    def snapshot(self, name: str) -> tuple[float, Any] | None:
        """The newest stored state of something, with its Unix time."""
        with self._open() as connection:
            row = connection.execute("SELECT time, body FROM snapshots WHERE name = ?", (name,)).fetchone()
        return (row["time"], json.loads(row["body"])) if row else None

    def traces(self, limit: int = 20) -> list[TraceRow]:
        """The groups whose production ended last, newest first."""
        with self._open() as connection:
            roots = connection.execute(
                "SELECT * FROM spans WHERE name = ? AND group_id IS NOT NULL ORDER BY id DESC LIMIT ?",
                (names.SPAN_ROLLOUT_GROUP, limit),
            ).fetchall()
            return [_trace_row(connection, row) for row in roots]

    def trace(self, group_id: str) -> TraceView | None:
        """Every span of every trace of a group; None when it was not traced (yet)."""
        with self._open() as connection:
            rows = connection.execute(
                "SELECT * FROM spans WHERE trace_id IN (SELECT DISTINCT trace_id FROM spans WHERE group_id = ?)"
                " ORDER BY start_ns, id",
                (group_id,),
            ).fetchall()
        if not rows:
            return None
        first = min(row["start_ns"] for row in rows)
        last = max(row["end_ns"] for row in rows)
        return TraceView(
            group_id=group_id,
            trace_ids=sorted({row["trace_id"] for row in rows}),
            start_time=first / 1e9,
            duration=(last - first) / 1e9,
            num_spans=len(rows),
            spans=_tree(rows, first)[:MAX_SPANS],
        )


def _step(row: sqlite3.Row) -> StepView:
    values = {key: value if math.isfinite(value) else None for key, value in json.loads(row["value_json"]).items()}
    return StepView(
        kind=row["kind"], name=row["name"], step=row["step"], revision=row["revision"], time=row["time"],
        weight_version=row["weight_version"], trace_id=row["trace_id"], values=values,
    )  # fmt: skip


def _add_generated(connection: sqlite3.Connection, views: list[StepView]) -> None:
    """Fill generated_tokens_per_second from the samples within each step's time."""
    training = [view for view in views if view.kind == "train"]
    if not training:
        return
    spans = [max(view.values.get(names.SECONDS_STEP) or 0.0, _LEAST_WINDOW_SECONDS) for view in training]
    begin = min(view.time - span for view, span in zip(training, spans, strict=True))
    rows = connection.execute(
        "SELECT time, tokens_per_second FROM fleet_samples WHERE time > ? AND engines > 0 ORDER BY time", (begin,)
    ).fetchall()
    times = [row[0] for row in rows]
    totals = [0.0]
    for row in rows:
        totals.append(totals[-1] + row[1])
    for view, span in zip(training, spans, strict=True):
        low, high = bisect_right(times, view.time - span), bisect_right(times, view.time)
        if high > low:
            view.generated_tokens_per_second = (totals[high] - totals[low]) / (high - low)


def _trace_row(connection: sqlite3.Connection, root: sqlite3.Row) -> TraceRow:
    count, first, last, step, errors = connection.execute(
        "SELECT count(*), min(start_ns), max(end_ns), max(CASE WHEN name = ? THEN step END), count(error)"
        " FROM spans WHERE trace_id = ?",
        (names.SPAN_TRAINER_TRAIN_GROUP, root["trace_id"]),
    ).fetchone()
    return TraceRow(
        group_id=root["group_id"], trace_id=root["trace_id"],
        attempt=json.loads(root["attributes"]).get(names.ATTRIBUTE_ATTEMPT),
        start_time=first / 1e9, duration=(last - first) / 1e9, num_spans=count, step=step, errors=errors,
    )  # fmt: skip


def _tree(rows: list[sqlite3.Row], first: int) -> list[SpanView]:
    """Depth-first order; a span whose parent is not here stands at the top."""
    known = {row["span_id"] for row in rows}
    children: dict[str, list[sqlite3.Row]] = {}
    for row in rows:
        children.setdefault(row["parent_id"] if row["parent_id"] in known else "", []).append(row)
    views: list[SpanView] = []
    stack = [(row, 0) for row in reversed(children.get("", []))]
    while stack:
        row, depth = stack.pop()
        view = SpanView(
            span_id=row["span_id"], parent_id=row["parent_id"], depth=depth, service=row["service"],
            member=row["member"], name=row["name"], start=(row["start_ns"] - first) / 1e9,
            duration=(row["end_ns"] - row["start_ns"]) / 1e9, error=row["error"],
            attributes=json.loads(row["attributes"]),
        )  # fmt: skip
        views.append(view)
        stack += [(child, depth + 1) for child in reversed(children.get(row["span_id"], []))]
    return views
