"""A launcher with its terminal view: what `paceline run` and `paceline up` share."""

from __future__ import annotations

import argparse
import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.cli.observe import Observer
from paceline.cli.progress import Progress
from paceline.config import ConfigError, RunFile, load_run_file
from paceline.config.check import check
from paceline.config.errors import EXIT_CONFIG
from paceline.launcher.launcher import Launcher
from paceline.launcher.lock import lock_directory
from paceline.launcher.process import StartFailed

INTERRUPTED = 130
LAST_RECORDS_SECONDS = 5.0
Finish = Callable[[Launcher, Observer, float], Awaitable[None]]


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """What `run` and `up` are given alike."""
    parser.add_argument("run_file", type=Path)
    parser.add_argument(
        "overrides", nargs="*", help="key=value, as in run.steps=5 or trainer.optimizer.learning_rate=1e-4"
    )
    parser.add_argument("--fresh", action="store_true", help="set an earlier run of this name aside and start anew")


def prepare(arguments: argparse.Namespace, console: Console) -> RunFile:
    """Load and check the run file and its data before anything starts; only then is an earlier run set aside."""
    config = load_run_file(arguments.run_file, arguments.overrides)
    check(config)
    if arguments.fresh and (config.directory / "config.json").exists():
        with lock_directory(config.directory):
            target = set_aside(config.directory)
        say(console, f"the earlier run is now in {shown(target)}")
    return config


def set_aside(directory: Path) -> Path:
    """Rename a run's folder out of the way and return its new place."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    names = (f"{directory.name}-{stamp}{suffix}" for suffix in ("", *(f"-{number}" for number in range(2, 100))))
    target = next(path for name in names if not (path := directory.with_name(name)).exists())
    try:
        directory.rename(target)
    except OSError as error:
        raise ConfigError(f"{directory} cannot be renamed to {target.name}: {error.strerror}") from error
    return target


def say(console: Console, text: str) -> None:
    """Print a line as it is: people copy from it, so it is neither wrapped nor read as markup."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def shown(path: Path) -> str:
    """A path as a user would type it: relative where it lies below the current folder."""
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


async def run_launcher(config: RunFile, console: Console, until_done: bool, finish: Finish) -> int:
    """Start everything, show it, and stop it. With `until_done` end when the run has finished, else on Ctrl-C only."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupted.set)
    progress: Progress | None = None
    launcher = Launcher(config, lambda text: progress.message(text) if progress else say(console, text))
    observer: Observer | None = None
    began = time.time()
    try:
        if not await _start(launcher, console, interrupted):
            say(console, "stopped before every service had started")
            return INTERRUPTED
        observer = Observer(launcher.addresses["coordinator-0"], config.run.name)
        progress = Progress(console, observer.view, config.run.name, config.run.steps, lambda: links(launcher), began)
        for link in links(launcher):
            say(console, link)
        with progress:
            done = await _watch(launcher, observer, progress, interrupted, until_done)
        if done is None:
            say(console, f"stopped; the same command goes on from the last checkpoint in {shown(config.directory)}")
            return INTERRUPTED
        if not done:
            console.print("[red]the run cannot go on:[/]", escape(launcher.failure), highlight=False, soft_wrap=True)
            return EXIT_CONFIG if _refused(launcher) else 1
        await observer.poll_members()
        await finish(launcher, observer, time.time() - began)
        return _end(console, observer.view.run)
    except StartFailed as error:
        console.print("[red]could not start:[/]", escape(str(error)), highlight=False, soft_wrap=True)
        return EXIT_CONFIG if _refused(launcher) else 1
    finally:
        if observer is not None:
            await observer.close()
        await launcher.stop()


def _end(console: Console, run: pb.Run | None) -> int:
    """Say how a run ended that did not end as it was meant to; the exit code."""
    if run is None or run.state == pb.RUN_STATE_FINISHED:
        return 0
    failed = run.state == pb.RUN_STATE_FAILED
    head = "[red]the run has failed:[/]" if failed else "the run was stopped:"
    console.print(head, escape(run.reason), highlight=False, soft_wrap=True)
    return 1 if failed else 0


def _refused(launcher: Launcher) -> bool:
    """Whether a process ended because of what the user wrote."""
    return any(child.last_exit == EXIT_CONFIG for child in launcher.children.values())


def links(launcher: Launcher) -> list[str]:
    """Where a browser and an OpenAI client find the run."""
    found = []
    for name, label, suffix in (("dashboard-0", "dashboard", ""), ("gateway-0", "OpenAI API", "/v1")):
        child = launcher.children.get(name)
        if child is not None and "http_address" in child.announced:
            found.append(f"{label} http://{child.announced['http_address']}{suffix}")
    return found


async def _start(launcher: Launcher, console: Console, interrupted: asyncio.Event) -> bool:
    """Start the launcher; False when the user interrupted meanwhile."""
    starting = asyncio.create_task(launcher.start())
    stop = asyncio.create_task(interrupted.wait())
    try:
        with console.status("starting services") if console.is_terminal else _quiet():
            await asyncio.wait({starting, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return False
        starting.result()
        return True
    finally:
        for task in (starting, stop):
            task.cancel()
        await asyncio.gather(starting, stop, return_exceptions=True)


class _quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


async def _watch(
    launcher: Launcher, observer: Observer, progress: Progress, interrupted: asyncio.Event, until_done: bool
) -> bool | None:
    """True: finished. False: cannot go on. None: interrupted."""

    async def follow() -> None:
        async for record in observer.follow_steps():
            progress.step(record)

    async def poll() -> None:
        while True:
            await observer.poll_members()
            progress.update()
            await asyncio.sleep(0.5)

    background = [asyncio.create_task(follow()), asyncio.create_task(poll())]
    outcome = asyncio.create_task(launcher.watch())
    stop = asyncio.create_task(interrupted.wait())
    try:
        await asyncio.wait({outcome, stop, background[1]}, return_when=asyncio.FIRST_COMPLETED)
        if not (outcome.done() or stop.done()):
            background[1].result()
        if outcome.done() and outcome.result() and not until_done:
            await asyncio.wait({background[0]}, timeout=LAST_RECORDS_SECONDS)
            run = observer.view.run
            failed = f"has failed ({run.reason})" if run and run.state == pb.RUN_STATE_FAILED else "has finished"
            progress.message(f"the run {failed}; services stay up until Ctrl-C")
            failing = asyncio.create_task(launcher.failed.wait())
            await asyncio.wait({stop, failing}, return_when=asyncio.FIRST_COMPLETED)
            failing.cancel()
            return None if stop.done() else False
        if outcome.done():
            # The last records may still be on their way.
            await asyncio.wait({background[0]}, timeout=LAST_RECORDS_SECONDS)
            return outcome.result()
        return None
    finally:
        everything: list[asyncio.Task[Any]] = [*background, outcome, stop]
        for task in everything:
            task.cancel()
        await asyncio.gather(*everything, return_exceptions=True)
