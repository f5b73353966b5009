"""Channels to other services: no call without a deadline, frozen peers noticed, UNAVAILABLE retried."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from paceline.telemetry import tracing

MAX_MESSAGE_BYTES = 64 * 2**20

_SERVICE_CONFIG = json.dumps(
    {
        "methodConfig": [
            {
                "name": [{}],
                "retryPolicy": {
                    "maxAttempts": 4,
                    "initialBackoff": "0.1s",
                    "maxBackoff": "1s",
                    "backoffMultiplier": 2,
                    "retryableStatusCodes": ["UNAVAILABLE"],
                },
            }
        ]
    }
)

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # Keepalive alone does not notice a frozen peer; the ping timeout does, after their sum.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.enable_retries", 1),
    ("grpc.service_config", _SERVICE_CONFIG),
]


class MissingDeadline(RuntimeError):
    """A call was made without timeout=; every RPC must have one."""


def _check_deadline(details: grpc.aio.ClientCallDetails) -> None:
    if details.timeout is None:
        raise MissingDeadline(f"call of {details.method!r} has no timeout; pass timeout=<seconds>")


# Two classes: gRPC takes an interceptor for the first kind of call that it can serve, and for no other.
class _Unary(grpc.aio.UnaryUnaryClientInterceptor):
    async def intercept_unary_unary(self, continuation: Callable, details: Any, request: Any) -> Any:  # type: ignore[override]
        _check_deadline(details)
        return await continuation(details, request)


class _Stream(grpc.aio.UnaryStreamClientInterceptor):
    async def intercept_unary_stream(self, continuation: Callable, details: Any, request: Any) -> Any:  # type: ignore[override]
        _check_deadline(details)
        return _responses(await continuation(details, request))


async def _responses(call: Any) -> AsyncIterator[Any]:
    """The responses of a call that ends with its reader; gRPC forwards a cancellation in most waits, but not in all."""
    try:
        async for response in call:
            yield response
    finally:
        call.cancel()


def open_channel(address: str, retries: bool = True) -> grpc.aio.Channel:
    """A channel to `host:port`. Close it with `await channel.close()`. Calls without timeout= raise MissingDeadline.

    `retries=False` reports UNAVAILABLE at once, for a caller that has another server to ask.
    """
    interceptors = [_Unary(), _Stream(), *tracing.client_interceptors()]
    options = _OPTIONS if retries else [*_OPTIONS, ("grpc.enable_retries", 0)]
    return grpc.aio.insecure_channel(address, options=options, interceptors=interceptors)
