"""`paceline logs [RUN] [-s SERVICE] [-f]`: the processes' own words, merged in order of time."""

from __future__ import annotations

import argparse
import re
import sys
import time
from datetime import datetime
from pathlib import Path

from paceline.cli.runs import KnownRun, add_run_argument, find_run
from paceline.config import ConfigError

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")
_REDIS_TIME = re.compile(r"\d+:\w (\d\d \w{3} \d{4} \d\d:\d\d:\d\d\.\d{3})")
QUIET = ("redis",)
"""Logs of servers that are not ours, shown when asked for."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument(
        "-s", "--service", default="", help="only this member (engine-0) or service (engine); redis is shown only so"
    )
    parser.add_argument("-n", "--lines", type=int, default=100, help="how many lines from the end; 0: all")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines are written, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    known = find_run(arguments.run)
    paths = _paths(known, arguments.service)
    if not paths:
        names = ", ".join(sorted(path.stem for path in (known.directory / "logs").glob("*.log")))
        raise ConfigError(
            f"run {known.run_id!r} has no log of {arguments.service or 'a service'}; there are: {names or 'none yet'}"
        )
    positions = {path: path.stat().st_size for path in paths}
    for line in merged(paths)[-arguments.lines :]:
        print(line)
    while arguments.follow:
        for path in _paths(known, arguments.service):
            positions[path] = _print_from(path, positions.get(path, 0))
        sys.stdout.flush()
        time.sleep(0.3)
    return 0


def _paths(known: KnownRun, wanted: str) -> list[Path]:
    paths = sorted((known.directory / "logs").glob("*.log"))
    if not wanted:
        return [path for path in paths if path.stem not in QUIET]
    return [path for path in paths if path.stem == wanted or path.stem.rsplit("-", 1)[0] == wanted]


def merged(paths: list[Path]) -> list[str]:
    """All lines in order of time. One without a time stays with the one before it, or, at the top, with the next."""
    entries: list[tuple[str, str]] = []
    for path in paths:
        lines = path.read_text(errors="replace").splitlines()
        stamps = [_stamp(line) for line in lines]
        stamp = next(filter(None, stamps), "")
        for line, own in zip(lines, stamps, strict=True):
            stamp = own or stamp
            entries.append((stamp, f"{path.stem:<14}{line}"))
    entries.sort(key=lambda entry: entry[0])
    return [line for _, line in entries]


def _stamp(line: str) -> str:
    """The time that a line begins with, so that times compare as text; "" without one."""
    match = _TIME.match(line)
    if match:
        return match[0]
    match = _REDIS_TIME.match(line)
    if match is None:
        return ""
    try:
        return f"{datetime.strptime(match[1], '%d %b %Y %H:%M:%S.%f'):%Y-%m-%d %H:%M:%S,%f}"[:-3]
    except ValueError:
        return ""


def _print_from(path: Path, position: int) -> int:
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    end = data.rfind(b"\n") + 1
    for line in data[:end].decode(errors="replace").splitlines():
        print(f"{path.stem:<14}{line}")
    return position + end
