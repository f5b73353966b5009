"""Wakes whoever waits for "something changed", without losing a change between a look and the wait."""

from __future__ import annotations

import asyncio


class Bell:
    """Take a ticket, look, wait on the ticket: a ring after the ticket was taken ends the wait."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ticket(self) -> asyncio.Event:
        """What the next ring sets."""
        return self._event

    def ring(self) -> None:
        """Something changed."""
        self._event.set()
        self._event = asyncio.Event()


async def heard(ticket: asyncio.Event, seconds: float) -> bool:
    """Wait for the ring that a ticket stands for, or any event; False when it did not come within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            await ticket.wait()
    except TimeoutError:
        return False
    return True
