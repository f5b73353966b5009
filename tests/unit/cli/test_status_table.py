"""`paceline status` is a table that can be read in 80 columns and uses 160."""

from __future__ import annotations

import io
import re
import time

import pytest
from rich.console import Console

from paceline.api.common.v1 import status_service_pb2 as status_pb2
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.cli.observe import RunView
from paceline.cli.status_command import member_table

CAUSE = "an engine that takes requests; engine-0 is SYNCING and engine-1 was taken out after 3 failed probes"


def part(name: str, doing: str = "", waiting_for: str = "", seconds: float = 3.5) -> status_pb2.Activity:
    item = status_pb2.Activity(name=name, doing=doing, waiting_for=waiting_for)
    item.since_time.FromNanoseconds(int((time.time() - seconds) * 1e9))
    return item


@pytest.fixture
def view() -> RunView:
    view = RunView()
    activities = {
        "engine-0": [part("weights", "applying 3", "a weight version after 3"), part("decode", "idle")],
        "router-0": [part("queue", "no request waits"), part("engines", "0 of 1", CAUSE, 7000)],
        "trainer-0": [
            part("membership", "registered", seconds=0),
            part("loop", "training step 4 on 32 groups", "", 250),
        ],
        "reward-0": [part("pool", "idle")],
    }
    for name, items in activities.items():
        view.members[name] = pb.Member(member_id=name, state="READY", weight_version=3 if name == "engine-0" else 0)
        started = part("", seconds=50).since_time
        view.statuses[name] = status_pb2.GetStatusResponse(state="READY", activities=items, started_time=started)
    view.members["gateway-0"] = pb.Member(member_id="gateway-0")
    view.statuses["gateway-0"] = None
    return view


def rendered(view: RunView, width: int, everything: bool = False) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(member_table(view, everything))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_at_160_columns_every_cause_is_one_line(view: RunView) -> None:
    told = [re.sub(r"\s+", " ", re.sub(r"\d+ s ", "", line)) for line in rendered(view, 160)[1:]]
    assert told == [
        "engine-0 READY 3 weights: waits for a weight version after 3",
        "gateway-0 silent no answer within a second",
        "reward-0 READY process: serves",
        f"router-0 READY 2 h engines: waits for {CAUSE}",
        "trainer-0 READY 4 m loop: training step 4 on 32 groups",
    ]


def test_at_80_columns_only_a_long_cause_goes_on_below_itself(view: RunView) -> None:
    lines = rendered(view, 80)
    assert max(map(len, lines)) <= 80
    column = lines[0].index("does")
    longer = [line for line in lines if line.startswith(" " * column)]
    assert (len(lines) - len(longer), 0 < len(longer) <= 3) == (6, True)
    assert " ".join(CAUSE.split()) in " ".join(line[column:] for line in lines).replace("  ", " ")


def test_all_shows_every_part(view: RunView) -> None:
    text = "\n".join(rendered(view, 160, everything=True))
    for words in ("decode: idle", "queue: no request waits", "membership: registered"):
        assert words in text
