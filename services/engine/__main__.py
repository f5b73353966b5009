"""The engine process: one backend, the gRPC surface over it, and the agent that feeds it weights."""

from __future__ import annotations

import asyncio
import os

# Read once, when torch starts its thread pool: waiting threads that spin starve every other process of this machine.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

from paceline.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from paceline.config import make_plugin
from paceline.rpc.ending import run_is_over
from paceline.rpc.runtime import ServiceContext, run_service
from paceline.weights.transports.base import Transport
from services.engine.agent import WeightAgent
from services.engine.backends.base import EngineBackend
from services.engine.server import EngineServer


async def start(context: ServiceContext) -> None:
    """Wire the parts together; the model loads in the background while the process already answers."""
    config = context.config
    backend: EngineBackend = make_plugin(
        "engine_backend", config.engine.backend, "engine.backend", config.engine, config.model.path
    )
    transport: Transport = make_plugin(
        "transport", config.weights.transport, "weights.transport", config.directory, context.run_id
    )
    server = EngineServer(backend, context.status, config.engine.max_sequence_length)
    engine_grpc.add_EngineServiceServicer_to_server(server, context.rpc.server)
    context.status.facts.update(
        model=config.model.path, device=config.engine.device, dtype=config.engine.dtype,
        backend=config.engine.backend.name,
    )  # fmt: skip
    membership = context.membership
    assert membership is not None
    agent = WeightAgent(
        backend, transport, context.coordinator(), context.status, config.engine.pause_mode, membership.report_now
    )
    context.on_stop(backend.close)
    context.spawn("engine", _run(context, backend, agent))
    if context.place.parent_pid is None:
        # Attached by hand: nobody else tells it that its run is over.
        context.spawn("end of the run", _leave_with_run(context))


async def _leave_with_run(context: ServiceContext) -> None:
    activity = context.status.activity("run")
    reason = await run_is_over(context.coordinator(), context.run_id, activity)
    context.request_stop(0, reason)
    await asyncio.Event().wait()


async def _run(context: ServiceContext, backend: EngineBackend, agent: WeightAgent) -> None:
    activity = context.status.activity("engine")
    activity.set(f"loading {context.config.model.path}")
    await backend.load()
    context.status.state = "SYNCING"
    activity.set("serving")
    if context.membership is not None:
        context.membership.report_now()
    async with asyncio.TaskGroup() as group:
        group.create_task(backend.watch())
        group.create_task(agent.run())


if __name__ == "__main__":
    run_service("engine", start)
