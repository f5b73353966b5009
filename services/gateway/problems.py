"""Errors in OpenAI's shape, with the HTTP code that its clients act on."""

from __future__ import annotations

import math

import grpc
from starlette.responses import JSONResponse

from paceline.rpc import errors


class Problem(Exception):
    """An error answer: HTTP status, OpenAI's type and code, the parameter at fault when there is one."""

    def __init__(
        self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None,
        code: str | None = None, retry_after: float | None = None,
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict[str, object]:
        """The JSON object of the answer."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """The whole answer. Retry-After is in whole seconds, at least 1."""
        headers = {}
        if self.retry_after is not None:
            headers["retry-after"] = str(max(1, math.ceil(self.retry_after)))
        return JSONResponse(self.body(), self.status, headers)


def invalid(param: str, message: str, code: str | None = None) -> Problem:
    """400 for one field; the message begins with its name."""
    return Problem(400, f"{param}: {message}", param=param, code=code)


_BY_CODE = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "invalid_request_error", None),
    grpc.StatusCode.NOT_FOUND: (404, "invalid_request_error", "not_found"),
    grpc.StatusCode.ALREADY_EXISTS: (409, "invalid_request_error", "already_exists"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "invalid_request_error", "failed_precondition"),
    grpc.StatusCode.ABORTED: (409, "invalid_request_error", "aborted"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "rate_limit_error", "rate_limit_exceeded"),
    grpc.StatusCode.UNAVAILABLE: (503, "server_error", "unavailable"),
    grpc.StatusCode.CANCELLED: (503, "server_error", "unavailable"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "timeout_error", "deadline_exceeded"),
}


def from_rpc(error: grpc.aio.AioRpcError) -> Problem:
    """The HTTP answer for what the router said."""
    status, kind, code = _BY_CODE.get(error.code(), (500, "server_error", "internal_error"))
    meant = errors.from_rpc(error)
    delay = meant.retry_delay
    if status in (429, 503) and delay is None:
        delay = 1.0
    return Problem(status, meant.message, kind, code=code, retry_after=delay if status in (429, 503) else None)
