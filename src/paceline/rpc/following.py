"""Streams that go on for ever: after a lost connection, a silent peer or an orderly end they are opened again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from paceline.rpc import errors
from paceline.rpc.status import Activity

log = logging.getLogger(__name__)

STREAM_SECONDS = 3600.0
"""Deadline to give to a watch; it is opened again after that."""
SILENCE_SECONDS = 30.0
"""A watch promises a message at least every 10 s; after three times that the peer is taken for stuck."""
STREAM_ENDED = "the stream ended"
"""End of the cause of a wait after an orderly end, as that of a watch on a run which is over."""
_PAUSE_SECONDS = (0.1, 2.0)
_ENDED_SECONDS = 10.0
"""Pause after an orderly end: there is nothing to hear until the run is opened again."""
_FATAL = (
    grpc.StatusCode.OUT_OF_RANGE,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)


async def follow(
    open_stream: Callable[[], Any], activity: Activity, source: str, complete: Callable[[], bool] = lambda: False
) -> AsyncIterator[Any]:
    """Messages of `open_stream()` for ever. It is called again whenever the stream breaks and says where to go on.

    A stream that ends in order while `complete()` holds ends the messages. PacelineError passes for what a new try
    cannot mend: OUT_OF_RANGE and wrong requests.
    """
    pause = _PAUSE_SECONDS[0]
    while True:
        call = open_stream()
        cause = f"{source}: {STREAM_ENDED}"
        try:
            messages = aiter(call)
            while True:
                async with asyncio.timeout(SILENCE_SECONDS):
                    message = await anext(messages)
                pause = _PAUSE_SECONDS[0]
                yield message
        except StopAsyncIteration:
            if complete():
                return
            pause = _ENDED_SECONDS
        except TimeoutError:
            cause = f"{source}: silent for {SILENCE_SECONDS:g} s"
            log.warning(cause)
        except grpc.aio.AioRpcError as error:
            if error.code() in _FATAL:
                raise errors.from_rpc(error) from error
            cause = f"{source}: {errors.last_cause(error)}"
        finally:
            call.cancel()
        with activity.waiting(cause, pause):
            await asyncio.sleep(pause)
        pause = min(2 * pause, _PAUSE_SECONDS[1])
