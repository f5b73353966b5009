"""`paceline status [RUN]`: every process, its version, what it does and for whom it waits; within a second or two."""

from __future__ import annotations

import argparse
import asyncio
import time

from rich.console import Console
from rich.table import Table

from paceline.api.common.v1 import status_service_pb2 as status_pb2
from paceline.cli.audit_command import account_table
from paceline.cli.observe import Observer
from paceline.cli.runs import KnownRun, add_run_argument, find_run, redis_of
from paceline.ledger import Ledger
from paceline.rpc.errors import PacelineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    known = find_run(arguments.run)
    console = Console()
    if known.live is None:
        console.print(f"run {known.run_id!r} is not up ({known.directory})", highlight=False)
        return 1
    return asyncio.run(_show(known, console))


async def _show(known: KnownRun, console: Console) -> int:
    observer = Observer(known.address("coordinator-0"), known.run_id)
    try:
        await observer.poll_members()
        if not observer.view.members:
            console.print(
                "[red]the coordinator does not answer[/]; `paceline logs -s coordinator` says why", highlight=False
            )
            return 1
        console.print(_member_table(observer))
    finally:
        await observer.close()
    try:
        async with redis_of(known) as client:
            console.print(account_table(await Ledger(client, known.run_id).account()))
    except PacelineError as error:
        console.print(f"[red]no account:[/] {error}", highlight=False)
    return 0


def _member_table(observer: Observer) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("member", "state", "version", "does", "waits for", "since"):
        table.add_column(name, header_style="dim", no_wrap=name in ("member", "state"))
    for name, member in sorted(observer.view.members.items()):
        status = observer.view.statuses.get(name)
        if status is None:
            table.add_row(name, "[red]no answer[/]", str(member.weight_version or ""), "", "", "")
            continue
        version = str(member.weight_version) if member.weight_version else ""
        for index, item in enumerate(_interesting(status)):
            since = time.time() - item.since_time.seconds
            first = (name, status.state, version) if index == 0 else ("", "", "")
            table.add_row(*first, f"{item.name}: {item.doing}", item.waiting_for, f"{since:.0f} s")
    return table


def _interesting(status: status_pb2.GetStatusResponse) -> list[status_pb2.Activity]:
    items = [item for item in status.activities if item.name != "membership" or item.waiting_for]
    return items or [status_pb2.Activity(name="process", doing="serves", since_time=status.started_time)]
