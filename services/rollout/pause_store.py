"""Whether production is paused, and why: remembered in Redis, so that a restarted process stays paused."""

from __future__ import annotations

import asyncio

import redis.asyncio

from paceline.cancellation import cancellable
from paceline.ids import redis_prefix
from services.rollout.hold import Hold

_DAY_SECONDS = 86_400


class PauseStore:
    """The pause of one producer. Request ids are known for a day, so that a late repeat changes nothing."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str, owner: str, hold: Hold) -> None:
        self._client = client
        self._hold = hold
        self._prefix = redis_prefix(run_id, "rollout:pause")
        self._key = f"{self._prefix}reason:{owner}"
        self._turn = asyncio.Lock()

    async def restore(self) -> None:
        """Hold production when an earlier life was told to."""
        reason = await cancellable(self._client.get(self._key))
        if isinstance(reason, bytes):
            self._hold.pause(reason.decode())

    async def pause(self, reason: str, request_id: str) -> None:
        """Hold production until `resume`; durable when it returns."""
        async with self._turn:
            if await self._write(request_id, reason):
                self._hold.pause(reason)

    async def resume(self, request_id: str) -> None:
        """Go on; durable when it returns."""
        async with self._turn:
            if await self._write(request_id, None):
                self._hold.resume()

    async def _write(self, request_id: str, reason: str | None) -> bool:
        """Store pause (or its end, None) together with the request's id. False when that id was seen before."""
        seen = f"{self._prefix}request:{request_id}"
        if request_id and await cancellable(self._client.exists(seen)):
            return False
        async with self._client.pipeline(transaction=True) as pipe:
            if reason is None:
                pipe.delete(self._key)
            else:
                pipe.set(self._key, reason.encode())
            if request_id:
                pipe.set(seen, b"1", ex=_DAY_SECONDS)
            await cancellable(pipe.execute())
        return True
