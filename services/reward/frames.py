"""Messages between the pool and its workers: a length and a JSON object. Never pickle: a worker runs foreign code."""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any, BinaryIO

_HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 64 * 2**20


class BrokenFrame(ValueError):
    """The peer sent something that is not a message."""


def encode(message: dict[str, Any]) -> bytes:
    """The bytes of one message."""
    body = json.dumps(message).encode()
    return _HEADER.pack(len(body)) + body


def read(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message of a blocking stream; None when the peer has closed it."""
    header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    return _decode(stream.read(_length(header)))


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message of an asyncio stream. asyncio.IncompleteReadError when the peer ended."""
    header = await reader.readexactly(_HEADER.size)
    return _decode(await reader.readexactly(_length(header)))


def _length(header: bytes) -> int:
    (length,) = _HEADER.unpack(header)
    if length > MAX_FRAME_BYTES:
        raise BrokenFrame(f"a message of {length} bytes; at most {MAX_FRAME_BYTES}")
    return length


def _decode(body: bytes) -> dict[str, Any]:
    try:
        message = json.loads(body)
    except ValueError as error:
        raise BrokenFrame(f"not JSON: {body[:40]!r}") from error
    if not isinstance(message, dict):
        raise BrokenFrame(f"not an object: {body[:40]!r}")
    return message
