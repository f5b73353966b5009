"""The HTTP application: all surfaces, and errors in one shape."""

from __future__ import annotations

import logging

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from paceline.ids import new_id
from services.gateway.edge import ClientGone, Edge, gone_response
from services.gateway.problems import Problem
from services.gateway.routes import chat, completions, generate, health, models

log = logging.getLogger(__name__)

SURFACES = (chat, completions, generate, models, health)


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
