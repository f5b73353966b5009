"""`paceline audit [RUN]`: where every prompt went. Exit 1 when the account does not balance."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from paceline.cli.runs import KnownRun, add_run_argument, find_run, redis_of
from paceline.ledger import Account, Ledger
from paceline.rpc.errors import FailedPrecondition, PacelineError

NOTHING_YET = "no prompt was issued yet: rollout has not begun"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("--group", default="", help="tell the story of one prompt: e0.17")


def run(arguments: argparse.Namespace) -> int:
    return asyncio.run(_audit(find_run(arguments.run), arguments.group, Console()))


async def _audit(known: KnownRun, group: str, console: Console) -> int:
    if not group:
        return await show_account(known, console, recount=True)
    async with redis_of(known) as client:
        try:
            return await _story(Ledger(client, known.run_id), group, console)
        except PacelineError as error:
            console.print(f"[red]{escape(str(error))}[/]", highlight=False, soft_wrap=True)
            return 1


async def show_account(known: KnownRun, console: Console, recount: bool) -> int:
    """Print the account of a run; the exit code. One that has not begun has none, which is no fault."""
    if known.live is not None and not known.live["redis_url"]:
        console.print(NOTHING_YET)
        return 0
    try:
        async with redis_of(known) as client:
            account = await Ledger(client, known.run_id).account(recount=recount)
    except FailedPrecondition as error:
        if not known.trained:
            console.print(NOTHING_YET)
            return 0
        console.print(f"[red]no account:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    except PacelineError as error:
        console.print(f"[red]no account:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1
    console.print(account_table(account))
    return 0 if account.balanced else 1


async def _story(ledger: Ledger, group: str, console: Console) -> int:
    events = await ledger.history(group)
    if not events:
        console.print(f"group {group} was never issued", highlight=False)
        return 1
    table = Table(box=None, pad_edge=False)
    for name in ("after", "state", "detail"):
        table.add_column(name, header_style="dim")
    for event in events:
        table.add_row(f"{event.time - events[0].time:.3f} s", event.state, event.detail)
    console.print(table)
    return 0


def account_table(account: Account) -> Table:
    """The account as a table whose last line says whether it balances."""
    table = Table(box=None, pad_edge=False, show_header=False, title="ledger", title_justify="left", title_style="dim")
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column()
    table.add_row("issued", str(account.issued), f"of {account.dataset_size * account.epochs} prompts")
    table.add_row("trained", str(account.trained), f"{account.committed} of them committed by a checkpoint")
    for reason, count in sorted(account.dropped.items()):
        table.add_row("dropped", str(count), reason)
    table.add_row("dead", str(account.dead), "failed too often" if account.dead else "")
    states = ("waiting", "generating", "buffered", "claimed")
    flight = ", ".join(f"{getattr(account, state)} {state}" for state in states)
    table.add_row("in flight", str(account.in_flight), flight)
    if account.refused_stale:
        table.add_row("refused", str(account.refused_stale), "times as too stale; counted, then reissued or dropped")
    verdict = "[green]balances[/]" if account.balanced else "[red bold]does not balance[/]"
    table.add_row("account", verdict, "issued = trained + dropped + dead + in flight")
    return table
