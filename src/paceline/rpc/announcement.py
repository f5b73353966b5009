"""What a process says once it serves: one line of JSON, to a pipe that the one who started it reads."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping


def announce(fd: int, address: str, labels: Mapping[str, str]) -> None:
    """Write {"address": ..., labels...} to the pipe of PACELINE_READY_FD, and close it."""
    with os.fdopen(fd, "w") as pipe:
        pipe.write(json.dumps({"address": address, **labels}) + "\n")


async def read_announcement(fd: int) -> dict[str, str] | None:
    """Wait for what `announce` wrote; None when the pipe was closed without it. `fd` stays open."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(os.dup(fd), "rb")
    )
    try:
        line = await reader.readline()
    finally:
        transport.close()
    return json.loads(line) if line else None
