"""An HTTP server inside a service's own event loop: the address first, then uvicorn on it. Needs the packages starlette
and uvicorn, which the extras of the services with an HTTP side bring."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Awaitable, Callable, Iterator

import uvicorn
from starlette.types import ASGIApp


def bind(listen: str, setting: str) -> socket.socket:
    """A listening TCP socket on host:port; OSError names the setting whose address cannot be taken.

    It listens at once: whoever reads the announced address may connect before the server's loop runs.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, int(port)))
        bound.listen(1024)
    except OSError as error:
        bound.close()
        raise OSError(f"{setting} = {listen!r}: {error.strerror}") from error
    return bound


class HttpServer(uvicorn.Server):
    """uvicorn on a socket that is bound already, in a process that has its own signal handlers.

    At the end `before_end` is called, which ends what would go on for ever; then requests have `stop_seconds`.
    """

    def __init__(
        self, app: ASGIApp, bound: socket.socket, stop_seconds: int,
        before_end: Callable[[], Awaitable[None]] | None = None,
    ) -> None:  # fmt: skip
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=stop_seconds,
            server_header=False,
        )  # fmt: skip
        super().__init__(settings)
        self._bound = bound
        self._stop_seconds = stop_seconds
        self._before_end = before_end

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_until_cancelled(self) -> None:
        """Serve; when cancelled let requests end for a moment, then break them off."""
        serving = asyncio.create_task(self.serve(sockets=[self._bound]))
        try:
            await asyncio.shield(serving)
        finally:
            if self._before_end is not None:
                await self._before_end()
            self.should_exit = True
            await asyncio.wait([serving], timeout=self._stop_seconds + 1)
