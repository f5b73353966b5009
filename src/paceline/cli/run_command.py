"""`paceline run FILE [key=value ...]`: train, watch, and end with what came out."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console

from paceline.cli import summary
from paceline.cli.launch import add_launch_arguments, prepare, run_launcher, say, shown
from paceline.cli.observe import Observer
from paceline.config.kinds import is_generated
from paceline.launcher.launcher import Launcher
from paceline.ledger import Ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_launch_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    config = prepare(arguments, console)

    async def finish(launcher: Launcher, observer: Observer, seconds: float) -> None:
        import redis.asyncio

        client = redis.asyncio.Redis.from_url(launcher.redis_url, socket_timeout=10)
        try:
            account = await Ledger(client, config.run.name).account(recount=True)
        finally:
            await client.aclose()
        figures = summary.summarize(observer.view, account, seconds)
        path = summary.write(figures, config.directory)
        summary.show(console, figures, observer.view)
        exported = config.directory / "export"
        if exported.exists():
            say(console, f"exported model: {shown(exported)}")
        say(console, f"figures: {shown(path)}")
        if figures["state"] == "failed":
            return
        if is_generated(config):
            again = shown(config.directory / "config.json")
            say(console, f"talk to the model: paceline up {again}, then any OpenAI client")
        elif config.evaluation:
            say(console, f"evaluate the model: paceline eval {shown(config.directory)}")

    return asyncio.run(run_launcher(config, console, until_done=True, finish=finish))
