"""Find a run by name, folder or run file, and reach its processes."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio

from paceline.config import ConfigError, RunFile, load_run_file
from paceline.launcher.process import Child
from paceline.launcher.redis_server import RedisServer


@dataclass(frozen=True)
class KnownRun:
    """A run that has a folder here."""

    directory: Path
    config: RunFile
    live: dict[str, Any] | None
    """launcher.json while the launcher of the run is alive, else None."""

    @property
    def run_id(self) -> str:
        return self.config.run.name

    @property
    def ready(self) -> bool:
        """Whether every service of the live run has started."""
        return self.live is not None and self.live.get("ready", True)

    @property
    def trained(self) -> bool:
        """Whether a step was trained, so that there must be an account."""
        metrics = self.directory / "metrics.jsonl"
        return metrics.exists() and metrics.stat().st_size > 0

    def address(self, member: str) -> str:
        """host:port of a member; ConfigError when the run is not up."""
        if self.live is None:
            raise ConfigError(
                f"run {self.run_id!r} is not up; start it with `paceline up {self.directory / 'config.json'}`"
            )
        address = self.live["addresses"].get(member)
        if not address:
            known = ", ".join(self.live["addresses"])
            raise ConfigError(f"run {self.run_id!r} has no {member!r}; it has {known}")
        return address


def add_run_argument(parser: Any) -> None:
    parser.add_argument(
        "run", nargs="?", default="", help="name of the run, its folder, or its run file; default: the latest"
    )


def find_run(text: str) -> KnownRun:
    """The run that `text` means; empty for the latest. ConfigError says which runs there are, or how to make one."""
    directory = _directory(text)
    config_path = directory / "config.json"
    if not config_path.exists():
        known = sorted(path.parent.name for path in Path("runs").glob("*/config.json"))
        if not known:
            which = f"no run {text!r}: " if text else ""
            raise ConfigError(
                f"{which}there are no runs in {Path.cwd() / 'runs'}. Start one with `paceline run FILE`, or go to the "
                "folder where it was started, or name the run's own folder"
            )
        raise ConfigError(f"no run {text!r} here; there are: {', '.join(known)}")
    return KnownRun(directory, load_run_file(config_path), _live(directory))


def _directory(text: str) -> Path:
    if not text:
        found = sorted(Path("runs").glob("*/config.json"), key=lambda path: path.stat().st_mtime)
        return found[-1].parent if found else Path("runs")
    path = Path(text)
    if path.suffix in (".toml", ".json") and path.is_file():
        return load_run_file(path).directory
    return path if (path / "config.json").exists() else Path("runs") / text


def _live(directory: Path) -> dict[str, Any] | None:
    try:
        content = json.loads((directory / "launcher.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    try:
        os.kill(content["pid"], 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        return content
    return content


@asynccontextmanager
async def redis_of(run: KnownRun) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of the run's Redis. For a run that is down, its server is started on its file and stopped again."""
    if run.live is not None:
        url, child = run.live["redis_url"], None
    elif run.config.launcher.redis_url:
        url, child = run.config.launcher.redis_url, None
    else:
        folder = run.directory / "redis"
        if not folder.exists():
            raise ConfigError(f"run {run.run_id!r} has no data in {folder}")
        server = RedisServer(folder)
        child = Child(server.spec(), run.directory / "logs" / "redis.log")
        await child.start(30.0)
        url = server.url
    client = redis.asyncio.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=5)
    try:
        yield client
    finally:
        await client.aclose()
        if child is not None:
            await child.stop(10.0)
