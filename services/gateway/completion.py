"""What chat and text completions have in common: fields, one run of the router, JSON and server-sent events."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from paceline.api.common.v1 import generation_pb2 as generation_pb
from services.gateway.choices import Choice, Piece, newest_version, usage
from services.gateway.edge import Asked, Edge, seeds_from, while_connected
from services.gateway.fields import Fields
from services.gateway.problems import Problem, invalid

VERSION_HEADER = "x-paceline-weight-version"
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
SAMPLING_FIELDS = (
    "model", "n", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed", "stream", "stream_options",
    "ignore_eos", "return_token_ids", "return_tokens_as_token_ids", "logprobs",
)  # fmt: skip


@dataclass(frozen=True)
class Plan:
    """One request, read and checked."""

    asked: Asked
    model: str
    stops: list[str]
    with_logprobs: bool
    with_token_ids: bool
    tokens_as_ids: bool
    with_usage: bool
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def id(self) -> str:
        """The part of the answer's id that names the request in the run."""
        return self.asked.request_id


def plan(
    edge: Edge, request: Request, fields: Fields, prompt_ids: list[int], max_tokens: int | None, num_top: int | None,
    names: tuple[str, str],
) -> Plan:  # fmt: skip
    """Check what both surfaces share. `names` are the fields that hold the prompt and the token limit.

    `num_top` is None without log-probabilities, else how many alternatives to give at each token.
    """
    sampling = generation_pb.SamplingParams(
        temperature=fields.number("temperature", 1.0, 0, 10),
        top_p=fields.number("top_p", 1.0, 0, 1, above=True),
        top_k=max(fields.integer("top_k", 0, -1, 2**31 - 1) or 0, 0),
        max_new_tokens=edge.room(prompt_ids, max_tokens, *names),
        stop=fields.texts("stop", 16),
        stop_token_ids=fields.integers("stop_token_ids", 64),
        ignore_eos=fields.flag("ignore_eos"),
    )
    count = fields.integer("n", 1, 1, MAX_CHOICES) or 1
    options = fields.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise invalid("stream_options", f"{options!r} is not an object", "invalid_value")
    asked = Asked(
        prompt_ids, sampling, seeds_from(fields.integer("seed", None, -(2**63), 2**64 - 1), count),
        fields.flag("stream"), num_top or 0, request.headers.get("x-session-id", ""),
    )  # fmt: skip
    return Plan(
        asked, edge.check_model(fields.get("model")), list(sampling.stop), num_top is not None,
        fields.flag("return_token_ids"), fields.flag("return_tokens_as_token_ids"),
        bool((options or {}).get("include_usage")),
    )  # fmt: skip


Finished = Callable[[Plan, list[Choice]], dict[str, Any]]
Chunk = Callable[[Plan, Choice, Piece, bool], dict[str, Any]]


async def answer(edge: Edge, request: Request, made: Plan, finished: Finished, chunk: Chunk) -> Response:
    """The HTTP answer: one JSON object by `finished`, or events by `chunk` (its last argument: the choice's first)."""
    choices = [Choice(index, edge.tokenizer, made.stops) for index in range(len(made.asked.seeds))]
    outputs = edge.generate(made.asked)
    if not made.asked.stream:
        await while_connected(request, _collect(outputs, choices))
        version = newest_version(choices)
        body = finished(made, choices) | {
            "usage": usage(len(made.asked.prompt_ids), choices), "weight_version": version,
        }  # fmt: skip
        return JSONResponse(body, headers={VERSION_HEADER: str(version)})
    try:
        first = await while_connected(request, anext(outputs))
    except StopAsyncIteration:
        raise Problem(500, "the router sent no token and no reason", "server_error") from None
    version = max((span.weight_version for span in first.version_spans), default=0)
    events = _events(made, choices, first, outputs, chunk)
    headers = {VERSION_HEADER: str(version), "cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(events, media_type="text/event-stream", headers=headers)


async def _collect(outputs: AsyncIterator[generation_pb.GenerationOutput], choices: list[Choice]) -> None:
    async for output in outputs:
        choices[output.index].push(output)
    unfinished = [choice.index for choice in choices if choice.finish_reason is None]
    if unfinished:
        raise Problem(500, f"choices {unfinished} were not finished by the router", "server_error")


async def _events(
    made: Plan, choices: list[Choice], first: generation_pb.GenerationOutput,
    rest: AsyncGenerator[generation_pb.GenerationOutput, None], chunk: Chunk,
) -> AsyncIterator[str]:  # fmt: skip
    """Server-sent events up to [DONE]. An error after the first token is an event of its own, and the last."""
    begun: set[int] = set()
    try:
        async for output in _chained(first, rest):
            choice = choices[output.index]
            piece = choice.push(output)
            is_first = choice.index not in begun
            shown = piece.text or piece.finish_reason or made.with_token_ids or made.with_logprobs
            if not shown and not is_first:
                continue
            begun.add(choice.index)
            body = chunk(made, choice, piece, is_first) | {"weight_version": newest_version([choice])}
            if made.with_usage:
                body["usage"] = None
            yield event(body)
        if made.with_usage:
            body = chunk(made, choices[0], Piece("", [], [], [], []), False)
            yield event(body | {"choices": [], "usage": usage(len(made.asked.prompt_ids), choices)})
    except Problem as problem:
        yield event(problem.body())
        return
    finally:
        # However the client goes, the generation ends with it.
        await rest.aclose()
    yield "data: [DONE]\n\n"


async def _chained(
    first: generation_pb.GenerationOutput, rest: AsyncIterator[generation_pb.GenerationOutput]
) -> AsyncIterator[generation_pb.GenerationOutput]:
    yield first
    async for output in rest:
        yield output


def event(body: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def token_text(edge: Edge, made: Plan, token_id: int) -> str:
    """A token as text, or as "token_id:7" when the client asked for that."""
    return f"token_id:{token_id}" if made.tokens_as_ids else edge.tokenizer.decode([token_id])
