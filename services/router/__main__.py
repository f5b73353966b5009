"""The router process: both watches of the coordinator around one Router."""

from __future__ import annotations

from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.rpc.members import MemberWatch
from paceline.rpc.runtime import ServiceContext, run_service
from paceline.weights.watch import VersionWatch
from services.router.router import Router
from services.router.versions import coordinator_lookup


async def start(context: ServiceContext) -> None:
    """Wire the parts together."""
    stub, run_id = context.coordinator(), context.run_id
    router = Router(context.config.router, context.status, run_id, coordinator_lookup(stub, run_id))
    router_grpc.add_RouterServiceServicer_to_server(router.server, context.rpc.server)
    members = MemberWatch(stub, run_id, "engine", context.status.activity("members"))
    versions = VersionWatch(stub, run_id, context.status.activity("versions"))
    context.spawn("router", router.run(members, versions.follow()))
    context.status.facts["policy"] = context.config.router.policy.name
    context.status.state = "READY"


if __name__ == "__main__":
    run_service("router", start)
