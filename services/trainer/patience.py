"""Waiting out a part that is away: repeats an idempotent call while a repeat can help, and shows for whom it waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc.aio
import redis.exceptions

from paceline.rpc import errors
from paceline.rpc.status import Activity

T = TypeVar("T")

_PAUSE_SECONDS = 0.3
_KNOWN = (errors.PacelineError, grpc.aio.AioRpcError, redis.exceptions.RedisError)


async def patiently(call: Callable[[], Awaitable[T]], who: str, activity: Activity) -> T:
    """The result of `call`, repeated without end while its failure is one that may pass; else the PacelineError."""
    while True:
        try:
            return await call()
        except _KNOWN as error:
            known = errors.translate(error)
            if known is None:
                raise
            if not (known.retryable or isinstance(known, errors.DeadlineExceeded)):
                raise known from error
            with activity.waiting(f"{who}: {known.message}"):
                await asyncio.sleep(known.retry_delay or _PAUSE_SECONDS)
