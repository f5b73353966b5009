"""A bell that is rung after each change, so that watchers of this process read again at once."""

from __future__ import annotations

import asyncio


class Bell:
    """Wakes those who wait for a change. Read `count` before reading the state, then wait for it to move on."""

    def __init__(self) -> None:
        self.count = 0
        self._event = asyncio.Event()

    def ring(self) -> None:
        self.count += 1
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, seen: int, seconds: float) -> bool:
        """Wait until `count` differs from `seen`; False when that took longer than `seconds`."""
        if self.count != seen:
            return True
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True
