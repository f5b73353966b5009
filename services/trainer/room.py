"""A full disk is waited out: what is in memory is worth more than a quick end, and somebody can make room."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

from paceline.rpc import errors

log = logging.getLogger(__name__)

T = TypeVar("T")

_PAUSE_SECONDS = 2.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether a write failed for want of space or quota. Libraries that write natively have it in their text only."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return "No space left on device" in str(error) or "Disk quota exceeded" in str(error)


def with_place(error: OSError, path: Path) -> None:
    """Put a path into the error's text: those of a write have none."""
    if error.filename is None:
        error.filename = str(path)


async def until_room(
    call: Callable[[], Awaitable[T]], what: str, waiting: Callable[[str], AbstractContextManager[None]],
    pause: float = _PAUSE_SECONDS,
) -> T:  # fmt: skip
    """The result of a call that writes files, repeated until there is room for them.

    The call must leave nothing behind that a repeat does not replace. Every other failure is raised.
    """
    while True:
        try:
            return await call()
        except Exception as error:
            if not is_full(error):
                raise
            cause = f"room on the disk for {what}: {error}"
            log.error("waiting for %s. Free some space, and training goes on where it is", cause)
        with waiting(cause):
            await asyncio.sleep(pause)


async def with_room(call: Callable[[], Awaitable[T]], what: str) -> T:
    """The result of a call that writes files for a client. ResourceExhausted when the disk is full."""
    try:
        return await call()
    except Exception as error:
        if is_full(error):
            raise errors.ResourceExhausted(
                f"no room on the disk for {what}: {error}; free some and repeat", 5.0
            ) from error
        raise
