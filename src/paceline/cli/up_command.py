"""`paceline up FILE [key=value ...]`: the run's services, kept up until Ctrl-C, also after the run has finished."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from rich.console import Console

from paceline.cli.launch import prepare, run_launcher
from paceline.cli.observe import Observer
from paceline.config import load_run_file
from paceline.launcher.launcher import Launcher


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*", help="key=value")


def run(arguments: argparse.Namespace) -> int:
    config = load_run_file(arguments.run_file, arguments.overrides)
    lock = prepare(config, fresh=False)

    async def finish(launcher: Launcher, observer: Observer, seconds: float) -> None:
        return None

    with lock:
        code = asyncio.run(run_launcher(config, Console(), until_done=False, finish=finish))
    # Ctrl-C is how `up` is meant to end.
    return 0 if code == 130 else code
