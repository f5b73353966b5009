"""Client interceptors that trace gRPC calls and leave the calls themselves as they are.

Those of OpenTelemetry wait inside the interceptor for the status of a unary call: a caller that is cancelled meanwhile
cancels that wait alone, so the handler runs on until the deadline, and the span never ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
import grpc.aio
from opentelemetry import propagate, trace

_TRACER = trace.get_tracer("paceline.rpc")
_STATUS = "rpc.grpc.status_code"


class CallTracing:
    """A client span for each call whose details `wanted` accepts, and its traceparent in the metadata.

    The span ends when the call is done, by whatever it is ended; the caller gets gRPC's own call.
    """

    def __init__(self, wanted: Callable[[Any], bool]) -> None:
        self._wanted = wanted
        self._ending: set[asyncio.Task[None]] = set()

    def interceptors(self) -> Sequence[grpc.aio.ClientInterceptor]:
        """One for unary calls and one for response streams: gRPC takes an interceptor for one kind only."""
        return _Unary(self), _Stream(self)

    async def begin(self, continuation: Callable, details: Any, request: Any) -> Any:
        """Start the call of an interceptor."""
        if not self._wanted(details):
            return await continuation(details, request)
        span = _start(details.method)
        try:
            call = await continuation(_with_trace(details, span), request)
        except BaseException:
            span.end()
            raise
        call.add_done_callback(lambda done: self._end_soon(done, span))
        return call

    def _end_soon(self, call: grpc.aio.Call, span: trace.Span) -> None:
        # The status of a call that is done is there at once, but gRPC tells it by coroutines only.
        task = asyncio.ensure_future(_end(call, span))
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


class _Unary(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, tracing: CallTracing) -> None:
        self._tracing = tracing

    async def intercept_unary_unary(self, continuation: Callable, details: Any, request: Any) -> Any:  # type: ignore[override]
        return await self._tracing.begin(continuation, details, request)


class _Stream(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, tracing: CallTracing) -> None:
        self._tracing = tracing

    async def intercept_unary_stream(self, continuation: Callable, details: Any, request: Any) -> Any:  # type: ignore[override]
        return await self._tracing.begin(continuation, details, request)


def _start(method: str | bytes) -> trace.Span:
    name = method.decode() if isinstance(method, bytes) else method
    service, _, called = name.lstrip("/").partition("/")
    attributes = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": called}
    return _TRACER.start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)


def _with_trace(details: Any, span: trace.Span) -> grpc.aio.ClientCallDetails:
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    metadata = grpc.aio.Metadata(*(details.metadata or ()), *carrier.items())
    return grpc.aio.ClientCallDetails(
        details.method, details.timeout, metadata, details.credentials, details.wait_for_ready
    )


async def _end(call: grpc.aio.Call, span: trace.Span) -> None:
    try:
        code = await call.code()
        span.set_attribute(_STATUS, code.value[0])
        if code is not grpc.StatusCode.OK:
            span.set_status(trace.StatusCode.ERROR, await call.details())
    finally:
        span.end()
