"""`paceline doctor`: what this machine has and lacks, each with what to do about it."""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import socket
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.table import Table

from paceline.config import ConfigError
from paceline.launcher import leftovers
from paceline.launcher.redis_server import find_server

Finding = tuple[str, str, str]
"""(mark, what, detail): mark is "ok", "note" or "fail"."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check that this machine can run everything. Exit 1 when something needed is missing."


def run(arguments: argparse.Namespace) -> int:
    findings = [_python(), *_packages(), _redis(), _memory(), _shared_memory(), *_leftovers()]
    findings += [_disk(), _loopback(), _threads()]
    table = Table(box=None, pad_edge=False, show_header=False)
    colours = {"ok": "green", "note": "yellow", "fail": "red"}
    for mark, what, detail in findings:
        table.add_row(f"[{colours[mark]}]{mark}[/]", what, detail)
    Console().print(table)
    return 1 if any(mark == "fail" for mark, _, _ in findings) else 0


def _python() -> Finding:
    text = sys.version.split()[0]
    return ("ok" if sys.version_info >= (3, 11) else "fail", "Python", f"{text} (3.11 or newer is needed)")


def _packages() -> list[Finding]:
    found: list[Finding] = []
    wanted = {
        "grpc": ("grpcio", "fail", "pip install paceline"),
        "torch": ("torch", "note", "needed by trainer and engine: pip install 'paceline[trainer,engine]'"),
        "transformers": ("transformers", "note", "needed by trainer and engine"),
        "tokenizers": ("tokenizers", "note", "needed by rollout and gateway: pip install 'paceline[rollout,gateway]'"),
        "math_verify": ("math-verify", "note", "needed by the math grader: pip install 'paceline[reward]'"),
        "starlette": ("starlette", "note", "needed by dashboard and gateway"),
    }
    for module, (package, mark, advice) in wanted.items():
        if importlib.util.find_spec(module) is None:
            found.append((mark, package, f"not installed; {advice}"))
            continue
        try:
            found.append(("ok", package, version(package)))
        except PackageNotFoundError:
            found.append(("ok", package, "installed"))
    return found


def _redis() -> Finding:
    try:
        return ("ok", "Redis or Valkey server", str(find_server().name))
    except ConfigError as error:
        return ("fail", "Redis or Valkey server", str(error))


def _memory() -> Finding:
    gigabytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return ("ok" if gigabytes >= 6 else "note", "memory", f"{gigabytes:.0f} GiB (the quickstart takes about 4)")


def _shared_memory() -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir():
        return ("note", "/dev/shm", "not here; set weights.transport = {name = 'disk'}")
    free = shutil.disk_usage(path).free / 2**20
    mark = "ok" if free > 600 else "note"
    return (mark, "/dev/shm", f"{free:.0f} MiB free; a published version takes the size of the model or adapter")


def _leftovers() -> list[Finding]:
    """Weights in memory of runs that were killed."""
    unmarked = [
        ("note", "left in memory", f"{path} does not say of which run it is; remove it when nothing runs here")
        for path in leftovers.unmarked()
    ]
    return unmarked + [
        (
            "note", "left in memory",
            f"{item.path}: {item.num_bytes / 2**20:.0f} MiB of the run in {item.run_directory}, which was killed; the "
            "next `paceline run` of anything removes it",
        )
        for item in leftovers.find()
    ]  # fmt: skip


def _disk() -> Finding:
    free = shutil.disk_usage(".").free / 2**30
    return ("ok" if free > 5 else "note", "disk here", f"{free:.0f} GiB free")


def _loopback() -> Finding:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
    except OSError as error:
        return ("fail", "loopback", f"cannot listen on 127.0.0.1: {error}")
    return ("ok", "loopback", "ports can be bound")


def _threads() -> Finding:
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    mark = "ok" if load < cores else "note"
    return (mark, "processor", f"{cores} cores, load {load:.1f}; engine and trainer take one each by default")
