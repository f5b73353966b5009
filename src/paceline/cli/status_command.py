"""`paceline status [RUN]`: every process, its weights, what it does or for whom it waits; within a second or two."""

from __future__ import annotations

import argparse
import asyncio
import time

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.api.common.v1 import status_service_pb2 as status_pb2
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.cli.audit_command import show_account
from paceline.cli.observe import Observer, RunView
from paceline.cli.runs import KnownRun, add_run_argument, find_run
from paceline.rpc.following import STREAM_ENDED

_BACKGROUND = ("membership", "leases", "version watch")
"""Parts that only keep a process in touch; they are told when they wait."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("-a", "--all", action="store_true", help="every part of every process, also those at rest")


def run(arguments: argparse.Namespace) -> int:
    known = find_run(arguments.run)
    console = Console()
    if known.live is None:
        console.print(
            f"run {known.run_id!r} is not up; its folder is {known.directory}", highlight=False, soft_wrap=True
        )
        return 1
    return asyncio.run(_show(known, arguments.all, console))


async def _show(known: KnownRun, everything: bool, console: Console) -> int:
    assert known.live is not None
    if "coordinator-0" not in known.live["addresses"]:
        console.print(_starting(known), highlight=False, soft_wrap=True)
        return 0
    observer = Observer(known.address("coordinator-0"), known.run_id)
    try:
        await observer.poll_members()
    finally:
        await observer.close()
    if not known.ready:
        console.print(_starting(known), highlight=False, soft_wrap=True)
    elif not observer.view.members:
        console.print(
            "[red]the coordinator does not answer[/]; `paceline logs -s coordinator` says why",
            highlight=False, soft_wrap=True,
        )  # fmt: skip
        return 1
    if observer.view.members:
        console.print(member_table(observer.view, everything))
        console.print()
    if known.ready:
        return await show_account(known, console, recount=False)
    return 0


def _starting(known: KnownRun) -> str:
    assert known.live is not None
    served = ", ".join(known.live["addresses"])
    seconds = time.time() - known.live["started"]
    return f"run {known.run_id!r} is starting, for {seconds:.0f} s; " + (
        f"up: {served}" if served else "none is up yet"
    )


def member_table(view: RunView, everything: bool) -> Table:
    """One line a process where it is busy; where it waits, one a cause. The text takes what the terminal has."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("process", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("weights", "since"):
        table.add_column(name, no_wrap=True, justify="right")
    table.add_column("does, or [yellow]waits for[/]", ratio=1)
    for name, member in sorted(view.members.items()):
        status = view.statuses.get(name)
        version = str(member.weight_version) if member.weight_version else ""
        if status is None:
            table.add_row(name, "[red]silent[/]", version, "", "no answer within a second")
            continue
        for index, item in enumerate(_told(status, everything)):
            first = (name, _state(member, status), version) if index == 0 else ("", "", "")
            table.add_row(*first, _age(time.time() - item.since_time.seconds), _text(item))
    return table


def _state(member: pb.Member, status: status_pb2.GetStatusResponse) -> str:
    state = status.state or member.state
    return f"[red]{state}[/]" if state == "FAILED" else state


def _text(item: status_pb2.Activity) -> str:
    if item.waiting_for:
        return f"{escape(item.name)}: [yellow]waits for {escape(item.waiting_for)}[/]"
    return escape(f"{item.name}: {item.doing or 'idle'}")


def _age(seconds: float) -> str:
    """At most four characters."""
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} m" if seconds < 6000 else f"{seconds / 3600:.0f} h"


def _told(status: status_pb2.GetStatusResponse, everything: bool) -> list[status_pb2.Activity]:
    """Every wait; without one, what the process turned to last."""
    parts = list(status.activities)
    # A watch on a run that is over has nothing to hear: that is no wait.
    waits = [item for item in parts if item.waiting_for and not item.waiting_for.endswith(STREAM_ENDED)]
    if everything or waits:
        return parts if everything else waits
    busy = [
        item for item in parts
        if item.name not in _BACKGROUND and item.doing not in ("", "idle") and not item.doing.startswith("watching")
    ]  # fmt: skip
    if busy:
        return [max(busy, key=lambda item: item.since_time.ToNanoseconds())]
    return [status_pb2.Activity(name="process", doing="serves", since_time=status.started_time)]
