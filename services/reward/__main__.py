"""Starts the reward service: the pool with the run's graders loaded, then the server."""

from __future__ import annotations

from paceline.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from paceline.rpc.runtime import ServiceContext, run_service
from services.reward.catalog import Catalog
from services.reward.pool import Pool
from services.reward.server import RewardServer


async def start(context: ServiceContext) -> None:
    settings = context.config.reward
    pool = Pool(settings, context.status)
    catalog = Catalog(pool, settings.graders)
    context.on_stop(pool.close)
    await catalog.start()
    context.spawn("pool", pool.run())
    server = RewardServer(pool, catalog, context.run_id, settings.timeout_seconds)
    pb_grpc.add_RewardServiceServicer_to_server(server, context.rpc.server)
    context.status.state = "READY"


if __name__ == "__main__":
    run_service("reward", start)
