"""GET /healthz: the process answers. GET /health: an engine can answer, and why not."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.gateway.edge import Edge
from services.gateway.problems import Problem


def routes(edge: Edge) -> list[Route]:
    """The routes of this surface."""

    async def alive(request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        try:
            listed = await edge.engines()
        except Problem as problem:
            return JSONResponse({"status": "unavailable", "reason": f"router: {problem.message}"}, 503)
        engines = {item.engine_id: item.excluded_reason or f"serves {item.weight_version}" for item in listed.engines}
        good = any(not item.excluded_reason for item in listed.engines)
        body = {"status": "ok" if good else "unavailable", "engines": engines, "num_waiting": listed.num_waiting}
        if not good:
            body["reason"] = "no engine takes requests" if engines else "no engine has joined the run"
        return JSONResponse(body, 200 if good else 503)

    return [Route("/healthz", alive), Route("/health", ready)]
