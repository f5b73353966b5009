"""What is written is there: after kill -9, beside a writer, on a stopped run; what is too much is counted, not kept."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from services.dashboard.queries import Reader
from services.dashboard.schema import ForeignSchema, open_writer
from services.dashboard.store import FleetSample, StepRow, Store


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    opened = Store(tmp_path / "telemetry.sqlite", "r", keep_spans=1000, pending_spans=3000)
    yield opened
    await opened.close()


def row(step: int, reward: float = 0.5, kind: str = "train", name: str = "", at: float | None = None) -> StepRow:
    values = {"reward_mean": reward, "seconds_step": 2.0}
    return StepRow(kind, name, step, at if at is not None else 1000.0 + 2 * step, step + 1, "", values, ["e0.1"])


def request(first: int, count: int, name: str = "rollout.group") -> ExportTraceServiceRequest:
    message = ExportTraceServiceRequest()
    scope = message.resource_spans.add().scope_spans.add()
    for number in range(first, first + count):
        span = scope.spans.add(name=name, trace_id=number.to_bytes(16, "big"), span_id=number.to_bytes(8, "big"))
        span.start_time_unix_nano, span.end_time_unix_nano = number, number + 5
        span.attributes.add(key="paceline.group_id").value.string_value = f"e0.{number}"
    return message


async def test_a_replayed_step_replaces_its_record_and_an_equal_one_changes_nothing(store: Store) -> None:
    reader = Reader(store.path)
    await store.put_steps([row(1), row(2), row(2, kind="evaluation", name="held_out")])
    assert reader.revision() == 3
    await store.put_steps([row(1), row(2)])
    assert reader.revision() == 3
    await store.put_steps([row(2, reward=0.75)])
    changed = reader.steps(after_revision=3)
    assert [(step.step, step.values["reward_mean"]) for step in changed] == [(2, 0.75)]
    everything = {(step.kind, step.name, step.step) for step in reader.steps()}
    assert everything == {("train", "", 1), ("train", "", 2), ("evaluation", "held_out", 2)}


async def test_a_long_run_is_thinned_out_but_keeps_its_last_step(store: Store) -> None:
    await store.put_steps([row(step) for step in range(1, 1001)])
    steps = Reader(store.path).steps(limit=100)
    assert len(steps) == 100
    assert steps[-1].step == 1000
    assert [step.step for step in steps] == sorted(step.step for step in steps)


async def test_numbers_that_are_not_finite_are_stored_and_shown_as_missing(store: Store) -> None:
    await store.put_steps([row(1, reward=float("nan")), row(2, reward=float("inf"))])
    assert [step.values["reward_mean"] for step in Reader(store.path).steps()] == [None, None]


async def test_generated_tokens_are_those_of_the_steps_own_time(store: Store) -> None:
    for second in range(10):
        await store.put_sample(FleetSample(1000.0 + second, 2, second % 2, 3, 0, 100.0 * second))
    await store.put_steps([row(1, at=1004.0), row(2, at=1008.0), row(3, at=2000.0)])
    rates = [step.generated_tokens_per_second for step in Reader(store.path).steps()]
    assert rates == [pytest.approx(350), pytest.approx(750), None]


async def test_idle_engines_are_measured_over_a_window(store: Store) -> None:
    for second in range(8):
        await store.put_sample(FleetSample(1000.0 + second, 4, 1 if second < 4 else 3, 5, 0, 10.0))
    reader = Reader(store.path)
    assert reader.busy(999.5, 1003.5).idle_share == pytest.approx(0.75)
    assert reader.busy(999.5, 1007.5).idle_share == pytest.approx(0.5)
    assert reader.busy(1006.5, 1007.5).idle_share is None, "one sample says nothing"


async def test_old_spans_make_room_for_new_ones(store: Store) -> None:
    for first in range(0, 5000, 500):
        while store.put_spans(request(first + 1, 500)):
            await store.flush()
    await store.flush()
    reader = Reader(store.path)
    with sqlite3.connect(store.path) as connection:
        kept = connection.execute("SELECT count(*) FROM spans").fetchone()[0]
    assert 1000 <= kept <= 2000
    assert reader.traces(1)[0].group_id == "e0.5000"
    assert reader.trace("e0.1") is None


async def test_spans_that_do_not_fit_are_refused_and_counted_without_blocking(store: Store) -> None:
    began = time.monotonic()
    refused = sum(store.put_spans(request(first, 1000)) for first in range(1, 40_000, 1000))
    assert time.monotonic() - began < 20
    await store.flush()
    counters = store.counters
    assert refused == counters.spans_dropped > 0
    assert counters.spans_received == 40_000
    assert counters.spans_stored + counters.spans_dropped == 40_000
    assert counters.spans_pending == 0


async def test_a_span_sent_twice_is_stored_once(store: Store) -> None:
    store.put_spans(request(1, 3))
    store.put_spans(request(1, 3))
    await store.flush()
    assert len(Reader(store.path).traces()) == 3


async def test_spans_with_impossible_times_do_not_stop_the_writer(store: Store) -> None:
    message = request(1, 2)
    message.resource_spans[0].scope_spans[0].spans[0].end_time_unix_nano = 2**64 - 1
    store.put_spans(message)
    await store.flush()
    trace = Reader(store.path).trace("e0.1")
    assert trace is not None and trace.num_spans == 1


async def test_the_history_of_the_account_is_thinned_and_keeps_the_newest(store: Store) -> None:
    for number in range(50):
        await store.put_account(1000.0 + number, f'{{"issued": {number}}}')
    points = Reader(store.path).accounts(limit=10)
    assert len(points) == 10
    assert points[-1].account == {"issued": 49}


_WRITER = """
import asyncio, sys
from pathlib import Path
from services.dashboard.store import StepRow, Store
async def main():
    store = Store(Path(sys.argv[1]), "r")
    for step in range(1, 1_000_000):
        await store.put_steps([StepRow("train", "", step, float(step), 1, "", {"loss": float(step)}, [])])
        print(step, flush=True)
asyncio.run(main())
"""


def test_what_was_committed_survives_kill_9(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.sqlite"
    writer = subprocess.Popen([sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    try:
        for line in writer.stdout:
            if int(line) >= 40:
                break
        os.kill(writer.pid, signal.SIGKILL)
        acknowledged = max([40, *(int(line) for line in writer.stdout.read().split("\n") if line)])
    finally:
        writer.kill()
        writer.wait(10)
    steps = Reader(path).steps()
    assert [step.step for step in steps][:acknowledged] == list(range(1, acknowledged + 1))
    with open_writer(path, "r") as connection:
        connection.execute("INSERT INTO accounts VALUES (1.0, '{}')")
    assert len(Reader(path).accounts()) == 1


@pytest.mark.parametrize("writable", [True, False])
async def test_a_stopped_run_is_read_without_a_writer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writable: bool
) -> None:
    folder = tmp_path / "run"
    store = Store(folder / "telemetry.sqlite", "r")
    await store.put_steps([row(1)])
    await store.put_snapshot("overview", '{"run": 1}')
    await store.close()
    assert [path.name for path in folder.iterdir()] == ["telemetry.sqlite"]
    monkeypatch.setattr(os, "access", lambda *_: writable)
    reader = Reader(folder / "telemetry.sqlite")
    assert reader.steps()[0].step == 1
    found = reader.snapshot("overview")
    assert found is not None and found[1] == {"run": 1}
    if not writable:
        assert [path.name for path in folder.iterdir()] == ["telemetry.sqlite"]


def test_a_file_that_is_no_database_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.sqlite"
    path.write_bytes(b"this is not a database, and long enough to be looked at" * 50)
    open_writer(path, "r").close()
    assert Reader(path).steps() == []
    assert len(list(tmp_path.glob("*.broken-*"))) == 1


def test_a_file_of_a_later_version_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.sqlite"
    with open_writer(path, "r") as connection:
        connection.execute("UPDATE meta SET value = '99' WHERE key = 'schema_version'")
    with pytest.raises(ForeignSchema, match="schema version 99"):
        open_writer(path, "r")
    assert path.exists()


def test_a_run_without_telemetry_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="did the run's dashboard ever start"):
        Reader(tmp_path / "telemetry.sqlite").steps()
