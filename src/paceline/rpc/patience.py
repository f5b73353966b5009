"""Waiting out a part that is away: the one loop that repeats a call while a repeat can help, visibly."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from typing import TypeVar

import grpc.aio
import redis.exceptions

from paceline.rpc import errors

T = TypeVar("T")

PAUSE_SECONDS = 0.3
_KNOWN = (errors.PacelineError, grpc.aio.AioRpcError, redis.exceptions.RedisError)


async def until_available(
    call: Callable[[], Awaitable[T]], who: str, waiting: Callable[[str], AbstractContextManager[None]]
) -> T:
    """The result of an idempotent call, repeated for as long as its failure is one that a repeat can mend.

    For calls without which nothing can go on (ledger, coordinator): they wait for ever, and say for whom by `waiting`.
    Any other failure is raised as the PacelineError that it means.
    """
    while True:
        try:
            return await call()
        except _KNOWN as error:
            known = errors.translate(error)
            helps = known is not None and (known.retryable or isinstance(known, errors.DeadlineExceeded))
            if known is None or (known is error and not helps):
                raise
            if not helps:
                raise known from error
            with waiting(f"{who}: {known.message}"):
                await asyncio.sleep(known.retry_delay or PAUSE_SECONDS)
