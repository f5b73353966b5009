"""The HTTP application: all surfaces, errors in one shape, and a server that lives inside the process's own loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from paceline.ids import new_id
from services.gateway.edge import ClientGone, Edge, gone_response
from services.gateway.problems import Problem
from services.gateway.routes import chat, completions, generate, health, models

log = logging.getLogger(__name__)

SURFACES = (chat, completions, generate, models, health)
STOP_SECONDS = 2


def application(edge: Edge) -> Starlette:
    """The application over every surface."""
    handlers = {Problem: _problem, ClientGone: _gone, HTTPException: _http, Exception: _unexpected}
    routes = [route for surface in SURFACES for route in surface.routes(edge)]
    return Starlette(routes=routes, exception_handlers=handlers)


async def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, Problem)
    return error.response()


async def _gone(request: Request, error: Exception) -> Response:
    return gone_response()


async def _http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}"
    return Problem(error.status_code, message, code="not_found" if error.status_code == 404 else None).response()


async def _unexpected(request: Request, error: Exception) -> Response:
    error_id = new_id()[:12]
    log.error("error %s in %s %s", error_id, request.method, request.url.path, exc_info=error)
    message = f"{type(error).__name__} in {request.url.path}; see error {error_id} in the gateway's log"
    return Problem(500, message, "server_error", code="internal_error").response()


class WebServer(uvicorn.Server):
    """uvicorn on a socket that is bound already, in a process that has its own signal handlers."""

    def __init__(self, app: ASGIApp, bound: socket.socket) -> None:
        settings = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=STOP_SECONDS,
            server_header=False,
        )  # fmt: skip
        super().__init__(settings)
        self._bound = bound

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def run_until_cancelled(self) -> None:
        """Serve; when cancelled let requests end for a moment, then break them off."""
        serving = asyncio.create_task(self.serve(sockets=[self._bound]))
        try:
            await asyncio.shield(serving)
        finally:
            self.should_exit = True
            await asyncio.wait([serving], timeout=STOP_SECONDS + 1)


def bind(listen: str) -> socket.socket:
    """A listening TCP socket on host:port; OSError names an address that cannot be taken.

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
        raise OSError(f"gateway.listen = {listen!r}: {error.strerror}") from error
    return bound
