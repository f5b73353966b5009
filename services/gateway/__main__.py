"""The gateway process: the HTTP server on its own port, health and status over gRPC."""

from __future__ import annotations

import asyncio

import grpc.aio

from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.rpc.http import HttpServer, bind
from paceline.rpc.runtime import ServiceContext, run_service
from paceline.rpc.server import check_listen
from paceline.tokenizer import Tokenizer
from services.gateway.edge import Edge
from services.gateway.web import application

STOP_SECONDS = 2
"""How long requests may go on after the process was told to stop."""


async def start(context: ServiceContext) -> None:
    """Wire the parts together."""
    config = context.config
    check_listen(config.gateway.listen, context.place.insecure)
    tokenizer = await asyncio.to_thread(Tokenizer.load, config.model.path)
    channel: grpc.aio.Channel = context.channel("router")
    router = router_grpc.RouterServiceStub(channel)
    edge = Edge(
        router, tokenizer, context.run_id,
        config.gateway.model_name, config.engine.max_sequence_length, config.gateway.request_timeout_seconds,
        context.status,
    )  # fmt: skip
    bound = bind(config.gateway.listen, "gateway.listen")
    host, port = bound.getsockname()[:2]
    context.labels["http_address"] = f"{host}:{port}"
    context.status.facts["api"] = f"http://{host}:{port}/v1"
    context.status.facts["model"] = config.gateway.model_name
    context.spawn("http", HttpServer(application(edge), bound, STOP_SECONDS).run_until_cancelled())
    context.status.state = "READY"


if __name__ == "__main__":
    run_service("gateway", start)
