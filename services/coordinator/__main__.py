"""Starts the coordinator: its store over Redis, its service, and the sweeper of leases."""

from __future__ import annotations

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ConstantBackoff

from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.rpc.runtime import ServiceContext, run_service
from services.coordinator.members import LeaseSweeper
from services.coordinator.server import CoordinatorServer
from services.coordinator.state import REDIS_SECONDS, Store


async def start(context: ServiceContext) -> None:
    """Wire the coordinator. Redis may come up later; until then calls are UNAVAILABLE."""
    # Its own client: a caller should learn that Redis is lost before its own deadline runs out.
    client = redis.asyncio.Redis.from_url(
        context.place.require_redis_url(), socket_timeout=REDIS_SECONDS, socket_connect_timeout=REDIS_SECONDS,
        retry=Retry(ConstantBackoff(0.05), 2),
    )  # fmt: skip
    store = Store(client)
    pb_grpc.add_CoordinatorServiceServicer_to_server(CoordinatorServer(store), context.rpc.server)
    sweeper = LeaseSweeper(store, context.status.activity("leases"))
    context.spawn("lease sweeper", sweeper.run())

    async def close() -> None:
        store.close()

    context.on_stop(client.aclose)
    context.on_stop(close)
    context.status.state = "READY"


if __name__ == "__main__":
    run_service("coordinator", start)
