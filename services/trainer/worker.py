"""The one thread that runs torch, so that the event loop stays free for gRPC and heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """Runs calls one after another in one thread. A call that was started runs to its end."""

    def __init__(self, prepare: Callable[[], None] | None = None) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="torch", initializer=prepare)

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """The result of call(*arguments)."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call, *arguments)

    async def close(self) -> None:
        """Start nothing more."""
        self._executor.shutdown(wait=False, cancel_futures=True)
