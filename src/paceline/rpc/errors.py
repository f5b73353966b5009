"""The one table of errors: each class is a gRPC code, whether a retry helps, and a message that says what to do."""

from __future__ import annotations

import grpc
import redis.exceptions

RETRY_DELAY_KEY = "paceline-retry-delay-seconds"
"""Trailing metadata of RESOURCE_EXHAUSTED and UNAVAILABLE: how long to wait before the next try, in seconds."""


class PacelineError(Exception):
    """An error with a gRPC code. Its text names the thing, its value and the fix, and holds no secret."""

    code = grpc.StatusCode.INTERNAL
    retryable = False

    def __init__(self, message: str, retry_delay: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_delay = retry_delay


class InvalidArgument(PacelineError):
    """The request itself is wrong; sending it again will not help."""

    code = grpc.StatusCode.INVALID_ARGUMENT


class NotFound(PacelineError):
    """The named thing does not exist."""

    code = grpc.StatusCode.NOT_FOUND


class AlreadyExists(PacelineError):
    """The id is taken."""

    code = grpc.StatusCode.ALREADY_EXISTS


class FailedPrecondition(PacelineError):
    """The system is in a state in which the request cannot be done."""

    code = grpc.StatusCode.FAILED_PRECONDITION


class Aborted(PacelineError):
    """The caller was replaced, or holds a stale fence, version or attempt."""

    code = grpc.StatusCode.ABORTED


class OutOfRange(PacelineError):
    """The history asked for was trimmed."""

    code = grpc.StatusCode.OUT_OF_RANGE


class ResourceExhausted(PacelineError):
    """A bound was reached; try again after retry_delay seconds."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    retryable = True


class Unavailable(PacelineError):
    """A part that is needed cannot be reached now; a retry helps."""

    code = grpc.StatusCode.UNAVAILABLE
    retryable = True


class DeadlineExceeded(PacelineError):
    """Time ran out; the message says what was waited for."""

    code = grpc.StatusCode.DEADLINE_EXCEEDED


class DataLoss(PacelineError):
    """Bytes on disk or in a store do not have the digest they should."""

    code = grpc.StatusCode.DATA_LOSS


BY_CODE: dict[grpc.StatusCode, type[PacelineError]] = {
    item.code: item
    for item in (
        InvalidArgument, NotFound, AlreadyExists, FailedPrecondition, Aborted,
        OutOfRange, ResourceExhausted, Unavailable, DeadlineExceeded, DataLoss,
    )
}  # fmt: skip


def from_rpc(error: grpc.aio.AioRpcError) -> PacelineError:
    """The PacelineError that a server meant, from what a client received."""
    kind = BY_CODE.get(error.code(), PacelineError)
    delay = None
    for key, value in error.trailing_metadata() or ():
        if key == RETRY_DELAY_KEY:
            delay = float(value)
    return kind(error.details() or error.code().name, delay)


def last_cause(error: grpc.aio.AioRpcError) -> str:
    """The code and the last cause in one line; gRPC puts a long list of attempts before it."""
    cause = (error.details() or "no details").rpartition("last error: ")[2].removeprefix("UNKNOWN: ")
    return f"{error.code().name}: {cause}"


def translate(error: BaseException) -> PacelineError | None:
    """The PacelineError for an exception whose meaning is known everywhere, else None."""
    if isinstance(error, PacelineError):
        return error
    if isinstance(error, grpc.aio.AioRpcError):
        return from_rpc(error)
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return ResourceExhausted(f"Redis is out of memory ({error}); raise maxmemory or let consumers catch up", 1.0)
    # In a pipeline or transaction the client puts words of its own before the server's.
    if isinstance(error, redis.exceptions.ReadOnlyError) or (
        isinstance(error, redis.exceptions.ResponseError) and "MISCONF " in str(error)
    ):
        return Unavailable(
            f"Redis takes no writes ({error}); is its disk full, or is it a replica? Free space and the run goes on",
            1.0,
        )
    if isinstance(error, redis.exceptions.ConnectionError | redis.exceptions.TimeoutError):
        return Unavailable(f"Redis cannot be reached ({error}); is it running, and is the address right?", 0.5)
    return None
