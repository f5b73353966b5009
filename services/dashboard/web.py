"""The HTTP side: the page's own files, a JSON API over the store, and the live stream."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from paceline.ids import GroupId
from services.dashboard.live import Live, steps_json
from services.dashboard.queries import Reader, TraceView

STATIC = Path(__file__).parent / "static"
_HEADERS = {
    b"content-security-policy": b"default-src 'self'; img-src 'self' data:; frame-ancestors 'none'",
    b"x-content-type-options": b"nosniff",
    b"referrer-policy": b"no-referrer",
    b"cache-control": b"no-cache",
}

History = Callable[[str], Awaitable[list[dict[str, Any]]]]


class GroupView(BaseModel):
    """What became of one group."""

    group_id: str
    history: list[dict[str, Any]]
    """Events of the ledger: time, state, detail."""
    trace: TraceView | None


class _Headers:
    """Adds the security headers to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS.items()]
            await send(message)

        await self._app(scope, receive, with_headers)


class Api:
    """Handlers of /api; each answers from memory or from the store, in a thread."""

    def __init__(self, live: Live, reader: Reader, history: History) -> None:
        self._live = live
        self._reader = reader
        self._history = history

    def routes(self) -> list[Route]:
        return [
            Route("/overview", self.overview),
            Route("/steps", self.steps),
            Route("/fleet", self.fleet),
            Route("/ledger", self.ledger),
            Route("/traces", self.traces),
            Route("/trace", self.trace),
            Route("/live", self.live),
        ]

    async def overview(self, request: Request) -> Response:
        return _json(self._live.overview.model_dump_json())

    async def steps(self, request: Request) -> Response:
        after = _integer(request, "after", 0, 0, 2**53)
        return _json(await asyncio.to_thread(lambda: steps_json(self._reader.steps(after))))

    async def fleet(self, request: Request) -> Response:
        wanted = {"members", "waits", "sources", "telemetry"}
        return _json(self._live.overview.model_dump_json(include=wanted))

    async def ledger(self, request: Request) -> Response:
        points = await asyncio.to_thread(self._reader.accounts, _integer(request, "points", 500, 1, 5000))
        account = self._live.overview.ledger
        return JSONResponse({
            "account": account.model_dump() if account else None,
            "history": [point.model_dump() for point in points],
        })  # fmt: skip

    async def traces(self, request: Request) -> Response:
        rows = await asyncio.to_thread(self._reader.traces, _integer(request, "limit", 20, 1, 200))
        return JSONResponse([row.model_dump() for row in rows])

    async def trace(self, request: Request) -> Response:
        text = request.query_params.get("group", "")
        try:
            GroupId.parse(text)
        except ValueError as error:
            raise HTTPException(400, str(error)) from error
        trace = await asyncio.to_thread(self._reader.trace, text)
        history = await self._history(text)
        if trace is None and not history:
            raise HTTPException(404, f"group {text} is neither in the ledger nor traced")
        return _json(GroupView(group_id=text, history=history, trace=trace).model_dump_json())

    async def live(self, request: Request) -> Response:
        seen = request.headers.get("last-event-id", "")
        after = int(seen) if seen.isdigit() else _integer(request, "after", 0, 0, 2**53)
        return StreamingResponse(
            self._live.events(after), media_type="text/event-stream", headers={"x-accel-buffering": "no"}
        )


def application(live: Live, reader: Reader, history: History, any_host: bool) -> Starlette:
    """The ASGI application. Unless `any_host`, only loopback names are answered, so that no foreign page can ask."""
    hosts = ["*"] if any_host else ["127.0.0.1", "localhost", "[::1]"]
    api = Starlette(routes=Api(live, reader, history).routes(), exception_handlers={HTTPException: _error})
    return Starlette(
        routes=[Mount("/api", api), Mount("/", StaticFiles(directory=STATIC, html=True))],
        middleware=[Middleware(_Headers), Middleware(TrustedHostMiddleware, allowed_hosts=hosts)],
    )


def _integer(request: Request, name: str, default: int, low: int, high: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not text.isdigit() or not low <= int(text) <= high:
        raise HTTPException(400, f"{name} = {text!r} must be a whole number from {low} to {high}")
    return int(text)


def _json(text: str) -> Response:
    return Response(text, media_type="application/json")


async def _error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": error.detail}, status_code=error.status_code)
