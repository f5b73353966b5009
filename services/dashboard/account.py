"""The ledger as the dashboard shows it: plain dictionaries, so that they can be stored and sent as they are."""

from __future__ import annotations

import asyncio
from typing import Any

import redis.asyncio
import redis.exceptions

from paceline.ledger import Ledger
from paceline.rpc import errors


class LedgerReader:
    """Reads the account and the histories of groups."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self._ledger = Ledger(client, run_id)

    async def account(self) -> dict[str, Any]:
        """The account, with its derived numbers."""
        try:
            return (await self._ledger.account()).summary()
        except errors.FailedPrecondition:
            # Redis was lost and the ledger restored from a checkpoint: it is another one now.
            await self._ledger.attach()
            return (await self._ledger.account()).summary()

    async def history(self, group_id: str) -> list[dict[str, Any]]:
        """Events of a group, oldest first; empty when there are none or Redis cannot be reached."""
        try:
            async with asyncio.timeout(3):
                events = await self._ledger.history(group_id)
        except (redis.exceptions.RedisError, errors.PacelineError, OSError, TimeoutError):
            return []
        return [{"time": event.time, "state": event.state, "detail": event.detail} for event in events]
