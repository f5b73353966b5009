"""GET /v1/models and /v1/models/{name}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from services.gateway.edge import Edge
from services.gateway.problems import Problem


def routes(edge: Edge) -> list[Route]:
    """The routes of this surface."""

    async def list_models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [await _model(edge)]})

    async def get_model(request: Request) -> Response:
        edge.check_model(request.path_params["name"])
        return JSONResponse(await _model(edge))

    return [Route("/v1/models", list_models), Route("/v1/models/{name:path}", get_model)]


async def _model(edge: Edge) -> dict[str, Any]:
    """The model in training. `weight_version` is the newest that an engine serves, 0 when none is known to."""
    try:
        engines = (await edge.engines()).engines
    except Problem:
        engines = []
    version = max((engine.weight_version for engine in engines if not engine.excluded_reason), default=0)
    return {
        "id": edge.model_name, "object": "model", "created": edge.created, "owned_by": "paceline",
        "max_model_len": edge.max_model_len, "run_id": edge.run_id, "weight_version": version,
    }  # fmt: skip
