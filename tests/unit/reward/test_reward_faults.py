"""The log of a reward service names the first faults with what to do, and does not drown in the later ones."""

from __future__ import annotations

import logging

import pytest

from services.reward.catalog import KnownGrader
from services.reward.faults import FIRST, Faults
from services.reward.pool import Outcome
from services.reward.scoring import combine

SLOW = [KnownGrader("slow", 1.0, {}, ())]
TIMEOUT = Outcome(missing="TIMEOUT", detail="ran past 5.0 s")


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_the_first_timeouts_name_group_grader_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    with caplog.at_level(logging.WARNING):
        for number in range(40):
            faults.add(f"e0.{number}", [f"e0.{number}/0"], [combine(SLOW, [TIMEOUT])])
    said = lines(caplog)
    assert len(said) == FIRST
    assert said[0].startswith("group e0.0, sample e0.0/0 has no reward: grader slow, TIMEOUT (ran past 5.0 s).")
    assert "raise reward.timeout_seconds" in said[0]
    assert "from here on" in said[-1] and "from here on" not in said[0]


def test_each_kind_and_each_grader_has_its_own_first_faults(caplog: pytest.LogCaptureFixture) -> None:
    faults, fault = Faults(), Outcome(missing="GRADER_ERROR", detail="ValueError: no good (mine.py:3)")
    other = [KnownGrader("other", 1.0, {}, ())]
    with caplog.at_level(logging.WARNING):
        for _ in range(FIRST + 1):
            faults.add("e0.1", ["a", "b"], [combine(SLOW, [TIMEOUT]), combine(SLOW, [fault])])
        faults.add("e0.2", ["c"], [combine(other, [fault])])
        faults.add("e0.3", ["d"], [combine(SLOW, [Outcome(value=1.0)])])
    assert len(lines(caplog)) == 2 * FIRST + 1
    assert "grader other, GRADER_ERROR (ValueError: no good (mine.py:3))" in lines(caplog)[-1]


def test_the_thousandth_is_a_reminder(caplog: pytest.LogCaptureFixture) -> None:
    faults = Faults()
    with caplog.at_level(logging.WARNING):
        faults.add("e0.1", [str(i) for i in range(1000)], [combine(SLOW, [TIMEOUT]) for _ in range(1000)])
    assert "Number 1000 of its kind" in lines(caplog)[-1]
