"""The gRPC server of every process: one port owner, errors as codes, health, status, graceful stop."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from paceline.api.common.v1 import status_service_pb2_grpc as status_grpc
from paceline.ids import new_id
from paceline.rpc import errors
from paceline.rpc.client import MAX_MESSAGE_BYTES
from paceline.rpc.status import StatusBoard, StatusServer
from paceline.telemetry import tracing

log = logging.getLogger(__name__)

_OPTIONS: list[tuple[str, Any]] = [
    # Without this a second server binds the same port silently and half of all connections hang.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
]


class InsecureListen(ValueError):
    """A service was told to listen off loopback without protection."""


def check_listen(listen: str, insecure: bool) -> None:
    """Refuse an address off loopback unless `insecure` was said. TLS is not there yet."""
    host = listen.rsplit(":", 1)[0].strip("[]")
    loopback = host == "localhost"
    if not loopback:
        try:
            loopback = ipaddress.ip_address(host).is_loopback
        except ValueError:
            loopback = False
    if not loopback and not insecure:
        raise InsecureListen(
            f"listen address {listen!r} is not loopback; without TLS anyone who reaches it controls the run. "
            "Listen on 127.0.0.1, or pass --insecure on a network you trust"
        )


class _ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of a handler into gRPC codes; an unexpected one becomes INTERNAL with an id found in the log."""

    async def intercept_service(
        self, continuation: Callable[..., Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        handler: Any = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        wrap = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        guarded = (
            _guard_stream(inner, handler_call_details.method)
            if handler.response_streaming
            else _guard(inner, handler_call_details.method)
        )
        return wrap(guarded, handler.request_deserializer, handler.response_serializer)


def _guard(inner: Callable, method: str) -> Callable:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await inner(request, context)
        except Exception as error:  # noqa: BLE001 - the boundary: every exception becomes a code
            await _abort(error, method, context)

    return call


def _guard_stream(inner: Callable, method: str) -> Callable:
    async def call(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        try:
            async for item in inner(request, context):
                yield item
        except Exception as error:  # noqa: BLE001 - the boundary: every exception becomes a code
            await _abort(error, method, context)

    return call


async def _abort(error: Exception, method: str, context: grpc.aio.ServicerContext) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    known = errors.translate(error)
    if known is None:
        error_id = new_id()[:12]
        log.exception("error %s in %s", error_id, method, exc_info=error)
        await context.abort(
            grpc.StatusCode.INTERNAL, f"{type(error).__name__} in {method}; see error {error_id} in the log"
        )
        return
    metadata = ()
    if known.retry_delay is not None:
        metadata = ((errors.RETRY_DELAY_KEY, f"{known.retry_delay:.3f}"),)
    await context.abort(known.code, known.message, metadata)


class RpcServer:
    """A grpc.aio server with health and status. `server` takes servicers before `start`."""

    def __init__(self, board: StatusBoard) -> None:
        self.server = grpc.aio.server(
            interceptors=[*tracing.server_interceptors(), _ErrorInterceptor()], options=_OPTIONS
        )
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        status_grpc.add_StatusServiceServicer_to_server(StatusServer(board), self.server)
        self.address = ""

    def bind(self, listen: str) -> str:
        """Take the port ("host:0" lets the system choose) and return host:port. OSError names a port that is taken."""
        try:
            port = self.server.add_insecure_port(listen)
        except RuntimeError as error:
            raise OSError(f"cannot listen on {listen}: is the port taken by another process?") from error
        self.address = f"{listen.rsplit(':', 1)[0]}:{port}"
        return self.address

    async def start(self) -> None:
        await self.server.start()

    async def set_serving(self, serving: bool) -> None:
        """What the health service answers."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        await self._health.set("", status)

    async def stop(self, grace: float = 5.0) -> None:
        """Refuse new calls, let running ones finish for `grace` seconds, then cancel them."""
        await self._health.enter_graceful_shutdown()
        await self.server.stop(grace)
