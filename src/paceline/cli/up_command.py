"""`paceline up FILE [key=value ...]`: the run's services, kept up until Ctrl-C, also after the run has finished."""

from __future__ import annotations

import argparse
import asyncio

from rich.console import Console

from paceline.cli.launch import add_launch_arguments, prepare, run_launcher
from paceline.cli.observe import Observer
from paceline.launcher.launcher import Launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_launch_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    console = Console()
    config = prepare(arguments, console)

    async def finish(launcher: Launcher, observer: Observer, seconds: float) -> None:
        return None

    code = asyncio.run(run_launcher(config, console, until_done=False, finish=finish))
    # Ctrl-C is how `up` is meant to end.
    return 0 if code == 130 else code
