"""A traced call behaves as an untraced one: a cancelled caller ends the handler, and every call leaves a whole span."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanKind

from paceline.api.router.v1 import router_service_pb2 as pb
from paceline.api.router.v1 import router_service_pb2_grpc as pb_grpc
from paceline.rpc import errors
from paceline.rpc.client import MissingDeadline, open_channel
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard
from paceline.telemetry import tracing

PROMPT_SECONDS = 10.0
CALL_SECONDS = 300.0
UNARY, STREAM = "/paceline.api.router.v1.RouterService/Abort", "/paceline.api.router.v1.RouterService/Generate"


class Handlers(pb_grpc.RouterServiceServicer):
    """Handlers that begin, and then wait until they are cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.traceparent = ""

    async def _hold(self) -> None:
        self.traceparent = tracing.current_traceparent()
        self.began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        if request.request_ids:
            raise errors.NotFound(f"no request {request.request_ids[0]}")
        await self._hold()
        return pb.AbortResponse()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse()
        await self._hold()

    async def ListEngines(self, request: pb.ListEnginesRequest, context: Any) -> pb.ListEnginesResponse:
        self.traceparent = tracing.current_traceparent()
        return pb.ListEnginesResponse(num_waiting=7)


class ClientSpans(SpanProcessor):
    """Ended spans of the calling side, as they come."""

    def __init__(self) -> None:
        self.ended: asyncio.Queue[ReadableSpan] = asyncio.Queue()

    def on_end(self, span: ReadableSpan) -> None:
        if span.kind is SpanKind.CLIENT:
            self.ended.put_nowait(span)

    async def next(self) -> tuple[str, dict[str, Any], str | None]:
        """Name, attributes and status text of the next one."""
        span = await asyncio.wait_for(self.ended.get(), PROMPT_SECONDS)
        return span.name, dict(span.attributes or {}), span.status.description


@dataclass
class Calls:
    """Handlers behind a real server, a traced stub of them, and its spans."""

    handlers: Handlers
    stub: Any
    spans: ClientSpans


@pytest.fixture
async def calls() -> AsyncIterator[Calls]:
    spans = ClientSpans()
    tracing.add_processor(spans)
    server, handlers = RpcServer(StatusBoard("router", "router-0", "1", "run")), Handlers()
    pb_grpc.add_RouterServiceServicer_to_server(handlers, server.server)
    address = server.bind("127.0.0.1:0")
    await server.start()
    channel = open_channel(address)
    yield Calls(handlers, pb_grpc.RouterServiceStub(channel), spans)
    await channel.close()
    await server.stop(0)


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def heard(event: asyncio.Event) -> None:
    await asyncio.wait_for(event.wait(), PROMPT_SECONDS)


async def test_a_cancelled_unary_call_ends_its_handler(calls: Calls) -> None:
    call = calls.stub.Abort(pb.AbortRequest(), timeout=CALL_SECONDS)
    task = asyncio.ensure_future(_awaited(call))
    await heard(calls.handlers.began)
    await cancel(task)
    await heard(calls.handlers.cancelled)  # `call` is still held: nothing is left to the garbage collector
    assert call.cancelled()
    name, attributes, _ = await calls.spans.next()
    assert name == UNARY and attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]


async def test_cancel_of_the_call_itself_ends_its_handler(calls: Calls) -> None:
    call = calls.stub.Abort(pb.AbortRequest(), timeout=CALL_SECONDS)
    await heard(calls.handlers.began)
    assert call.cancel()
    await heard(calls.handlers.cancelled)


async def test_a_timeout_around_a_unary_call_ends_its_handler(calls: Calls) -> None:
    call = calls.stub.Abort(pb.AbortRequest(), timeout=CALL_SECONDS)
    await heard(calls.handlers.began)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await call
    await heard(calls.handlers.cancelled)


async def test_a_cancelled_reader_of_a_stream_ends_its_handler(calls: Calls) -> None:
    call = calls.stub.Generate(pb.GenerateRequest(), timeout=CALL_SECONDS)
    task = asyncio.create_task(_read(call))
    await heard(calls.handlers.began)
    await cancel(task)
    await heard(calls.handlers.cancelled)
    name, attributes, _ = await calls.spans.next()
    assert name == STREAM and attributes["rpc.grpc.status_code"] == grpc.StatusCode.CANCELLED.value[0]


async def test_a_cancelled_stream_ends_its_handler(calls: Calls) -> None:
    call = calls.stub.Generate(pb.GenerateRequest(), timeout=CALL_SECONDS)
    async for _ in call:
        break
    await heard(calls.handlers.began)
    call.cancel()
    await heard(calls.handlers.cancelled)


async def test_a_call_passes_the_trace_on_and_leaves_one_span(calls: Calls) -> None:
    with tracing.span("test.root"):
        root = tracing.trace_id(tracing.current_traceparent())
        response = await calls.stub.ListEngines(pb.ListEnginesRequest(), timeout=CALL_SECONDS, metadata=(("a", "b"),))
    assert response.num_waiting == 7
    assert tracing.trace_id(calls.handlers.traceparent) == root
    name, attributes, _ = await calls.spans.next()
    assert name == "/paceline.api.router.v1.RouterService/ListEngines" and calls.spans.ended.empty()
    assert attributes["rpc.system"] == "grpc" and attributes["rpc.grpc.status_code"] == 0
    assert (attributes["rpc.service"], attributes["rpc.method"]) == (
        "paceline.api.router.v1.RouterService",
        "ListEngines",
    )


async def test_a_failed_call_keeps_its_code_and_its_span_says_so(calls: Calls) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await calls.stub.Abort(pb.AbortRequest(request_ids=["lost"]), timeout=CALL_SECONDS)
    assert failure.value.code() is grpc.StatusCode.NOT_FOUND and failure.value.details() == "no request lost"
    name, attributes, description = await calls.spans.next()
    assert name == UNARY and attributes["rpc.grpc.status_code"] == grpc.StatusCode.NOT_FOUND.value[0]
    assert description == "no request lost"


@pytest.mark.parametrize("method", ["Abort", "Generate"])
async def test_a_call_without_a_deadline_is_refused(calls: Calls, method: str) -> None:
    request = {"Abort": pb.AbortRequest(), "Generate": pb.GenerateRequest()}[method]
    call = getattr(calls.stub, method)(request)
    with pytest.raises(MissingDeadline, match=method):
        await (_read(call) if method == "Generate" else call)


async def _awaited(call: Any) -> Any:
    return await call


async def _read(call: Any) -> None:
    async for _ in call:
        pass
