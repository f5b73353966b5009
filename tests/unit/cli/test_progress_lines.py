"""The lines of a run without a terminal: of the steps before this start only the newest."""

from __future__ import annotations

import io

from rich.console import Console

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.cli.observe import RunView
from paceline.cli.progress import Progress
from paceline.telemetry import names

BEGAN = 1000.5


def _record(step: int, seconds: int) -> pb.StepRecord:
    record = pb.StepRecord(
        step=step, kind=pb.RECORD_KIND_TRAIN, values={names.REWARD_MEAN: 0.5, names.REWARD_MISSING: 0.0}
    )
    record.time.seconds = seconds
    return record


def _progress() -> tuple[Progress, io.StringIO]:
    out = io.StringIO()
    return Progress(Console(file=out), RunView(), "a-run", 9, lambda: [], BEGAN), out


def test_steps_of_an_earlier_start_are_one_line_before_the_first_new_one() -> None:
    progress, out = _progress()
    for step in (1, 2, 3):
        progress.step(_record(step, 900 + step))
    progress.step(_record(4, 1000))
    lines = out.getvalue().splitlines()
    assert len(lines) == 2
    assert lines[0].startswith("trained before, the newest: step 3/9")
    assert lines[1].startswith("step 4/9")


def test_the_line_waits_until_no_more_earlier_steps_come_and_is_printed_once() -> None:
    progress, out = _progress()
    progress.step(_record(1, 900))
    progress.update()
    progress.step(_record(2, 901))
    progress.update()
    assert out.getvalue() == ""
    progress.update()
    progress.update()
    assert out.getvalue().startswith("trained before, the newest: step 2/9")
    assert out.getvalue().count("step") == 1


def test_a_message_comes_after_the_earlier_steps() -> None:
    progress, out = _progress()
    progress.step(_record(9, 900))
    progress.message("the run has finished")
    first, second = out.getvalue().splitlines()
    assert "step 9/9" in first and second == "the run has finished"


def test_every_step_of_a_new_run_is_a_line() -> None:
    progress, out = _progress()
    for step in (1, 2):
        progress.step(_record(step, 1000 + step))
        progress.update()
    assert [line[:8] for line in out.getvalue().splitlines()] == ["step 1/9", "step 2/9"]
