"""`paceline run FILE [key=value ...]`: train, watch, and end with what came out."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console

from paceline.cli import summary
from paceline.cli.launch import prepare, run_launcher
from paceline.cli.observe import Observer
from paceline.config import load_run_file
from paceline.launcher.launcher import Launcher
from paceline.ledger import Ledger


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path)
    parser.add_argument(
        "overrides", nargs="*", help="key=value, as in run.steps=5 or trainer.optimizer.learning_rate=1e-4"
    )
    parser.add_argument("--fresh", action="store_true", help="set an earlier run of this name aside and start anew")


def run(arguments: argparse.Namespace) -> int:
    config = load_run_file(arguments.run_file, arguments.overrides)
    lock = prepare(config, arguments.fresh)
    console = Console()

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
            console.print(f"exported model: {exported}", highlight=False, soft_wrap=True)
        console.print(f"figures: {path}", highlight=False, soft_wrap=True)
        console.print(
            f"talk to the model: paceline up {config.directory / 'config.json'}, then any OpenAI client",
            highlight=False,
        )

    with lock:
        return asyncio.run(run_launcher(config, console, until_done=True, finish=finish))
