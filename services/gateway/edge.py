"""What every surface shares: the model's names and tokenizer, and calls to the router."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import grpc.aio
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.router.v1 import router_service_pb2 as pb
from paceline.api.router.v1 import router_service_pb2_grpc as pb_grpc
from paceline.ids import derived_seed, new_id
from paceline.rpc.status import StatusBoard
from paceline.tokenizer import Tokenizer
from services.gateway.problems import Problem, from_rpc, invalid

LIST_SECONDS = 5.0
CLIENT_GONE = 499
"""Status of the answer that nobody reads."""

T = TypeVar("T")


class ClientGone(Exception):
    """The HTTP client went away before its answer."""


@dataclass(frozen=True)
class Asked:
    """One generation, as every surface asks for it."""

    prompt_ids: list[int]
    sampling: generation_pb.SamplingParams
    seeds: list[int]
    stream: bool = False
    num_top_logprobs: int = 0
    session_id: str = ""
    request_id: str = field(default_factory=new_id)


class Edge:
    """The run as the gateway sees it."""

    def __init__(
        self, router: pb_grpc.RouterServiceAsyncStub, tokenizer: Tokenizer, run_id: str, model_name: str,
        max_model_len: int, timeout_seconds: float, board: StatusBoard,
    ) -> None:  # fmt: skip
        self.tokenizer = tokenizer
        self.run_id = run_id
        self.model_name = model_name
        self.max_model_len = max_model_len
        """Most tokens of prompt and answer together."""
        self.created = int(time.time())
        self._board = board
        board.gauges["num_running"] = 0
        self._router = router
        self._timeout_seconds = timeout_seconds

    def check_model(self, name: Any) -> str:
        """The model asked for; 404 lists those there are."""
        if not isinstance(name, str) or not name:
            raise invalid("model", f"{name!r} is not a model name; known: {self.model_name}", "missing_model")
        if name != self.model_name:
            raise Problem(
                404, f"model {name!r} does not exist; known: {self.model_name}", param="model", code="model_not_found"
            )
        return name

    def room(self, prompt_ids: list[int], asked: int | None, prompt_field: str, limit_field: str) -> int:
        """How many new tokens: what was asked for, else all that fit. 400 when they do not fit the model."""
        left = self.max_model_len - len(prompt_ids)
        if not prompt_ids:
            raise invalid(prompt_field, "is empty; give at least one token", "invalid_value")
        if left < 1:
            raise invalid(
                prompt_field, f"{len(prompt_ids)} tokens; the model takes {self.max_model_len}, answer included",
                "context_length_exceeded",
            )  # fmt: skip
        if asked is not None and asked > left:
            raise invalid(
                limit_field,
                f"{asked} new tokens after {len(prompt_ids)} of the prompt exceed the model's {self.max_model_len}",
                "context_length_exceeded",
            )
        return left if asked is None else asked

    async def generate(self, asked: Asked) -> AsyncGenerator[generation_pb.GenerationOutput, None]:
        """Outputs of the router; Problem for its errors. Closing the iterator ends the generation everywhere."""
        prompt = arrays.to_wire(np.array(asked.prompt_ids, np.int32))
        request = pb.GenerateRequest(
            input=generation_pb.GenerationInput(
                request_id=asked.request_id, run_id=self.run_id, prompt_token_ids=prompt, sampling=asked.sampling,
                seeds=asked.seeds, session_id=asked.session_id, stream=asked.stream,
                num_top_logprobs=asked.num_top_logprobs,
            )
        )  # fmt: skip
        call = self._router.Generate(request, timeout=self._timeout_seconds)
        self._board.gauges["num_running"] += 1
        try:
            async for message in call:
                yield message.output
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error
        finally:
            self._board.gauges["num_running"] -= 1
            call.cancel()

    async def engines(self) -> pb.ListEnginesResponse:
        """The router's engine table."""
        try:
            return await self._router.ListEngines(pb.ListEnginesRequest(), timeout=LIST_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise from_rpc(error) from error


def seeds_from(seed: int | None, count: int) -> list[int]:
    """Seeds of `count` samples: derived from a seed, so that the same request gives the same answers, else random."""
    if seed is None:
        return [secrets.randbits(63) for _ in range(count)]
    return [derived_seed(f"{seed}/{index}") for index in range(count)]


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """The result of `work`, which is cancelled when the client goes away; then ClientGone. The body must be read."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnect(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        gone.cancel()
        task.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def gone_response() -> Response:
    """The answer that nobody reads."""
    return Response(status_code=CLIENT_GONE)
