"""Starts the rollout service: data first, so that what is wrong with it ends the start, then production."""

from __future__ import annotations

import grpc.aio

from paceline.api.reward.v1 import reward_service_pb2_grpc as reward_grpc
from paceline.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.config.kinds import is_generated
from paceline.rpc.runtime import ServiceContext, run_service
from paceline.weights.watch import VersionWatch
from services.rollout.service import Collaborators, Data, RolloutService


async def start(context: ServiceContext) -> None:
    others = Collaborators(redis=context.redis(), coordinator=context.coordinator())
    if is_generated(context.config):
        router: grpc.aio.Channel = context.channel("router")
        reward: grpc.aio.Channel = context.channel("reward")
        others.router = router_grpc.RouterServiceStub(router)
        others.reward = reward_grpc.RewardServiceStub(reward)
    data = Data.load(context.config)
    service = RolloutService(context.config, context.member_id, data, others, context.status)
    await service.check()
    pb_grpc.add_RolloutServiceServicer_to_server(service.servicer, context.rpc.server)
    watch = VersionWatch(context.coordinator(), context.run_id, context.status.activity("versions"))
    context.spawn("rollout", service.run(watch.follow()))
    context.on_stop(service.close)


if __name__ == "__main__":
    run_service("rollout", start)
