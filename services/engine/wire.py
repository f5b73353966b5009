"""Between protobuf messages and the engine's own values; every fault names the field, its value and the bound."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

from paceline import arrays
from paceline.api.common.v1 import generation_pb2, sample_pb2
from paceline.generation import MAX_SAMPLES
from paceline.rpc import errors
from services.engine.generation import Piece, Request, Sampling

MAX_TOP_LOGPROBS = 128
MAX_STOPS = 64
MAX_ROUTING_BYTES = 2**20
"""Of one message; engine and rollout need share no file system, and a message must not be large."""
_NOTHING: dict[str, Any] = {
    "token_ids": [], "logprobs": [], "weight_versions": [], "text": "", "top_token_ids": [], "top_logprobs": [],
    "finish": None,
}  # fmt: skip

_REASONS = {
    "stop": generation_pb2.FINISH_REASON_STOP,
    "length": generation_pb2.FINISH_REASON_LENGTH,
    "abort": generation_pb2.FINISH_REASON_ABORT,
}


def read_request(message: generation_pb2.GenerationInput, max_sequence_length: int, vocabulary: int) -> Request:
    """Decode and check a request. InvalidArgument names field and value."""
    if not message.request_id:
        raise errors.InvalidArgument("input.request_id is empty; give every request an id of its own")
    try:
        prompt = arrays.from_wire(message.prompt_token_ids, "input.prompt_token_ids", dtype="int32")
    except ValueError as error:
        raise errors.InvalidArgument(str(error)) from error
    if prompt.ndim != 1 or not len(prompt):
        raise errors.InvalidArgument(
            f"input.prompt_token_ids has shape {list(prompt.shape)}; it must hold at least one token in one axis"
        )
    outside = prompt[(prompt < 0) | (prompt >= vocabulary)]
    if len(outside):
        raise errors.InvalidArgument(
            f"input.prompt_token_ids holds {int(outside[0])}; the model's ids are 0 to {vocabulary - 1}"
        )
    sampling = _read_sampling(message.sampling)
    if len(prompt) + sampling.max_new_tokens > max_sequence_length:
        raise errors.InvalidArgument(
            f"input.prompt_token_ids has {len(prompt)} tokens and sampling.max_new_tokens is "
            f"{sampling.max_new_tokens}: together over engine.max_sequence_length = {max_sequence_length}"
        )
    if not 1 <= len(message.seeds) <= MAX_SAMPLES:
        raise errors.InvalidArgument(f"input.seeds has {len(message.seeds)} seeds; ask for 1 to {MAX_SAMPLES} samples")
    if not 0 <= message.num_top_logprobs <= MAX_TOP_LOGPROBS:
        raise errors.InvalidArgument(
            f"input.num_top_logprobs = {message.num_top_logprobs}; it must be 0 to {MAX_TOP_LOGPROBS}"
        )
    return Request(
        request_id=message.request_id,
        prompt=prompt,
        seeds=tuple(message.seeds),
        sampling=sampling,
        min_version=message.gate.min_version,
        exact_version=message.gate.exact_version if message.gate.WhichOneof("gate") == "exact_version" else None,
        stream=message.stream,
        num_top_logprobs=min(message.num_top_logprobs, vocabulary),
        with_routing=message.return_routing,
    )


def _read_sampling(message: generation_pb2.SamplingParams) -> Sampling:
    """InvalidArgument for a value out of bounds; NaN is out of every bound."""
    bounds: list[tuple[str, float, float, float]] = [
        ("temperature", message.temperature, 0, 100),
        ("top_p", message.top_p, 0, 1),
        ("top_k", message.top_k, 0, float("inf")),
        ("max_new_tokens", message.max_new_tokens, 1, float("inf")),
    ]
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise errors.InvalidArgument(f"sampling.{name} = {value:g}; it must be {low:g} to {high:g}")
    if len(message.stop) > MAX_STOPS or "" in message.stop:
        raise errors.InvalidArgument(
            f"sampling.stop = {list(message.stop)[:4]}: give at most {MAX_STOPS} strings, none of them empty"
        )
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p or 1.0,
        top_k=message.top_k,
        max_new_tokens=message.max_new_tokens,
        stop=tuple(message.stop),
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def write_piece(piece: Piece, request: Request, engine_id: str) -> list[generation_pb2.GenerationOutput]:
    """Encode the next tokens of a sample: one message, after those that bring the rest of its routing."""
    parts = _routing_parts(piece.routing)
    messages = [_write(replace(piece, **_NOTHING), request, engine_id) for _ in parts[:-1]]
    messages.append(_write(piece, request, engine_id))
    for message, part in zip(messages, parts, strict=False):
        message.routing.CopyFrom(arrays.to_wire(part))
    return messages


def _routing_parts(routing: np.ndarray | None) -> list[np.ndarray]:
    """Rows in parts of at most MAX_ROUTING_BYTES, of one row at least."""
    if routing is None or not len(routing):
        return []
    size = max(1, MAX_ROUTING_BYTES // max(1, routing[0].nbytes))
    return [routing[first : first + size] for first in range(0, len(routing), size)]


def _write(piece: Piece, request: Request, engine_id: str) -> generation_pb2.GenerationOutput:
    output = generation_pb2.GenerationOutput(
        index=piece.index,
        token_ids=arrays.to_wire(np.asarray(piece.token_ids, np.int32)),
        sampler_logprobs=arrays.to_wire(np.asarray(piece.logprobs, np.float32)),
        version_spans=[
            sample_pb2.VersionSpan(weight_version=version, num_tokens=sum(1 for _ in run))
            for version, run in itertools.groupby(piece.weight_versions)
        ],
        text=piece.text,
        engine_id=engine_id,
    )
    if request.num_top_logprobs:
        shape = (len(piece.token_ids), request.num_top_logprobs)
        output.top_token_ids.CopyFrom(arrays.to_wire(np.asarray(piece.top_token_ids, np.int32).reshape(shape)))
        output.top_logprobs.CopyFrom(arrays.to_wire(np.asarray(piece.top_logprobs, np.float32).reshape(shape)))
    if piece.finish is not None:
        output.finish.CopyFrom(
            generation_pb2.GenerationFinish(
                reason=_REASONS[piece.finish.reason],
                matched_stop=piece.finish.matched_stop,
                num_prompt_tokens=len(request.prompt),
                num_cached_tokens=piece.finish.num_cached_tokens,
                num_generated_tokens=piece.finish.num_generated_tokens,
            )
        )
    return output
