"""Spans that real processes export over OTLP are stored as one trace a group, and a dead receiver costs nobody time."""

from __future__ import annotations

import asyncio
import sqlite3
import sys
from pathlib import Path

from dashboard_fake_run import dashboard, fake_run, get, until

_ROLLOUT = """
import sys, time
from paceline.telemetry import names, tracing
tracing.set_up("rollout", "r", "rollout-0", sys.argv[1])
with tracing.span(names.SPAN_ROLLOUT_GROUP, {names.ATTRIBUTE_GROUP_ID: "e0.17", names.ATTRIBUTE_ATTEMPT: 1}):
    with tracing.span(names.SPAN_ROLLOUT_GENERATE, {names.ATTRIBUTE_GROUP_ID: "e0.17"}):
        pass
    with tracing.span(names.SPAN_ROLLOUT_SCORE, {names.ATTRIBUTE_GROUP_ID: "e0.17"}):
        pass
    print(tracing.current_traceparent(), flush=True)
tracing.shut_down()
"""
_TRAINER = """
import sys, time
from paceline.telemetry import names, tracing
tracing.set_up("trainer", "r", "trainer-0", sys.argv[1])
parent, now = sys.argv[2], time.time()
tracing.record_span(names.SPAN_TRAINER_BUFFER_WAIT, now, now + 0.5, {names.ATTRIBUTE_GROUP_ID: "e0.17"}, parent)
group = {names.ATTRIBUTE_GROUP_ID: "e0.17", names.ATTRIBUTE_STEP: 3}
tracing.record_span(names.SPAN_TRAINER_TRAIN_GROUP, now + 0.5, now + 1.5, group, parent)
with tracing.span(names.SPAN_TRAINER_STEP, {names.ATTRIBUTE_STEP: 3}, links=[parent]):
    pass
tracing.shut_down()
"""


async def run_python(code: str, *arguments: str) -> str:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode().strip()


async def test_a_group_is_one_trace_over_two_processes(tmp_path: Path, redis_url: str) -> None:
    async with fake_run() as run, dashboard(run, tmp_path, redis_url) as process:
        traceparent = await run_python(_ROLLOUT, process.address)
        await run_python(_TRAINER, process.address, traceparent)

        async def stored() -> bool:
            overview = await get(process, "overview")
            return overview["telemetry"]["stored"] >= 6

        await until(stored, "six spans stored")
        body = await get(process, "trace?group=e0.17")
        spans = [(span["depth"], span["name"], span["member"]) for span in body["trace"]["spans"]]
        assert spans == [
            (0, "rollout.group", "rollout-0"),
            (1, "rollout.generate", "rollout-0"),
            (1, "rollout.score", "rollout-0"),
            (1, "trainer.buffer_wait", "trainer-0"),
            (1, "trainer.train_group", "trainer-0"),
        ]
        assert body["trace"]["trace_ids"] == [traceparent.split("-")[1]]
        listed = await get(process, "traces?limit=5")
        assert [(row["group_id"], row["step"], row["num_spans"]) for row in listed] == [("e0.17", 3, 5)]
    with sqlite3.connect(tmp_path / "run" / "telemetry.sqlite") as connection:
        links = connection.execute("SELECT links FROM spans WHERE name = 'trainer.step'").fetchone()[0]
    assert traceparent.split("-")[1] in links, "the step is linked to its group's trace"


async def test_a_receiver_that_is_gone_does_not_fail_the_sender() -> None:
    assert await run_python(_ROLLOUT, "127.0.0.1:9") != ""
