"""A cancelled caller ends, even when what it waits for loses cancellations."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from paceline.cancellation import cancellable, noticing


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


async def test_a_lost_cancellation_is_noticed_when_short_work_ends() -> None:
    began, end = asyncio.Event(), asyncio.Event()

    async def deaf() -> int:
        began.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await end.wait()
        return 7

    task = asyncio.create_task(noticing(deaf()))
    await began.wait()
    task.cancel()
    end.set()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(task, 10)


async def test_a_cancellation_from_before_is_not_noticed_again() -> None:
    async def cleans_up() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return await noticing(asyncio.sleep(0, 7))
        return 0

    task = asyncio.create_task(cleans_up())
    await asyncio.sleep(0)
    task.cancel()
    assert await task == 7


async def test_results_and_errors_pass() -> None:
    async def work(fail: bool) -> int:
        if fail:
            raise ValueError("no")
        return 7

    for way in (cancellable, noticing):
        assert await way(work(False)) == 7
        with pytest.raises(ValueError, match="no"):
            await way(work(True))
