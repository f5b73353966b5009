"""A cancelled caller ends, even when what it waits for loses cancellations."""

from __future__ import annotations

import asyncio

import pytest

from paceline.cancellation import cancellable


async def test_a_lost_cancellation_is_repeated_until_it_is_heard() -> None:
    lost = 0

    async def deaf() -> None:
        nonlocal lost
        while lost < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                lost += 1
        await asyncio.Event().wait()

    task = asyncio.create_task(cancellable(deaf()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)
    assert lost == 3


async def test_results_and_errors_pass() -> None:
    async def work(fail: bool) -> int:
        if fail:
            raise ValueError("no")
        return 7

    assert await cancellable(work(False)) == 7
    with pytest.raises(ValueError, match="no"):
        await cancellable(work(True))
