"""The dashboard process: OTLP receiver, run store, followers and page."""

from __future__ import annotations

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as otlp_grpc

from paceline.rpc.http import HttpServer, bind
from paceline.rpc.runtime import ServiceContext, run_service
from paceline.rpc.server import check_listen
from services.dashboard.account import LedgerReader
from services.dashboard.follow import Follower
from services.dashboard.live import Live
from services.dashboard.queries import Reader
from services.dashboard.receiver import TraceReceiver
from services.dashboard.schema import FILE_NAME
from services.dashboard.state import LiveState
from services.dashboard.store import Store
from services.dashboard.web import application

STOP_SECONDS = 1
"""How long requests may go on after the process was told to stop; its streams end at once."""


async def start(context: ServiceContext) -> None:
    """Wire the parts together."""
    listen = context.config.dashboard.listen
    check_listen(listen, context.place.insecure)
    bound = bind(listen, "dashboard.listen")
    host, port = bound.getsockname()[:2]
    context.labels["http_address"] = f"{host}:{port}"
    store = Store(context.config.directory / FILE_NAME, context.run_id)
    otlp_grpc.add_TraceServiceServicer_to_server(TraceReceiver(store), context.rpc.server)
    state, reader = LiveState(context.run_id), Reader(store.path)
    follower = Follower(state, store, context.coordinator(), context.status)
    follower.add_coordinator(context.place.address_of("coordinator"))
    ledger = LedgerReader(context.redis(), context.run_id)
    live = Live(state, store, reader, context.config)
    app = application(live, reader, ledger.history, context.place.insecure)
    web = HttpServer(app, bound, STOP_SECONDS, live.close)
    context.on_stop(store.close)
    context.on_stop(follower.close)
    context.spawn("steps", follower.follow_steps())
    context.spawn("run", follower.refresh_run())
    context.spawn("members", follower.follow_members())
    context.spawn("status", follower.poll_members())
    context.spawn("ledger", follower.poll_ledger(ledger.account))
    context.spawn("live", live.run())
    context.spawn("web", web.run_until_cancelled())
    context.status.facts["page"] = f"http://{host}:{port}/"
    context.status.state = "READY"


if __name__ == "__main__":
    run_service("dashboard", start)
