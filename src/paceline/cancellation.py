"""A cancellation that always gets through, for libraries that can lose one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")

_AGAIN_SECONDS = 0.05


async def noticing(work: Awaitable[T]) -> T:
    """The result of `work`, for work that is short: a cancellation that it lost is raised when it has ended.

    It costs no task of its own, which `cancellable` does; but a loss is noticed only once `work` returns.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    result = await work
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result


async def cancellable(work: Awaitable[T]) -> T:
    """The result of `work`. When the caller is cancelled, `work` is cancelled until it has ended.

    redis-py sends inside asyncio.wait_for, which on Python 3.11 returns normally when the cancellation meets the end of
    the send; the loop around it would then never learn that it was to stop.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.wait((task,))
    except asyncio.CancelledError:
        while not task.done():
            task.cancel()
            await asyncio.wait((task,), timeout=_AGAIN_SECONDS)
        if not task.cancelled():
            task.exception()  # Looked at, so that it is not reported as lost.
        raise
    return task.result()
