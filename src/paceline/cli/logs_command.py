"""`paceline logs [RUN] [-s SERVICE] [-f]`: the processes' own words, merged in order of time."""

from __future__ import annotations

import argparse
import re
import sys
import time
from pathlib import Path

from paceline.cli.runs import add_run_argument, find_run
from paceline.config import ConfigError

_TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_argument(parser)
    parser.add_argument("-s", "--service", default="", help="only this member (engine-0) or service (engine)")
    parser.add_argument("-n", "--lines", type=int, default=100, help="how many lines from the end")
    parser.add_argument("-f", "--follow", action="store_true", help="go on as lines are written, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    known = find_run(arguments.run)
    paths = sorted((known.directory / "logs").glob("*.log"))
    if arguments.service:
        wanted = arguments.service
        paths = [path for path in paths if path.stem == wanted or path.stem.rsplit("-", 1)[0] == wanted]
    if not paths:
        names = ", ".join(sorted(path.stem for path in (known.directory / "logs").glob("*.log")))
        raise ConfigError(f"no log of {arguments.service!r}; there are: {names or 'none'}")
    positions = {path: path.stat().st_size for path in paths}
    for line in _merged(paths)[-arguments.lines :]:
        print(line)
    while arguments.follow:
        for path in paths:
            positions[path] = _print_from(path, positions[path])
        sys.stdout.flush()
        time.sleep(0.3)
    return 0


def _merged(paths: list[Path]) -> list[str]:
    """All lines in order of time; a line without a time stays with the one before it."""
    entries: list[tuple[str, str]] = []
    for path in paths:
        stamp = ""
        for line in path.read_text(errors="replace").splitlines():
            match = _TIME.match(line)
            stamp = match[0] if match else stamp
            entries.append((stamp, f"{path.stem:<14}{line}"))
    entries.sort(key=lambda entry: entry[0])
    return [line for _, line in entries]


def _print_from(path: Path, position: int) -> int:
    with path.open("rb") as file:
        file.seek(position)
        data = file.read()
    end = data.rfind(b"\n") + 1
    for line in data[:end].decode(errors="replace").splitlines():
        print(f"{path.stem:<14}{line}")
    return position + end
