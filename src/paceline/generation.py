"""What an engine's messages bring, read and checked in one place for all that pass generated tokens on."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as pb
from paceline.api.common.v1 import sample_pb2
from paceline.routing import DTYPES as ROUTING_DTYPES

MAX_SAMPLES = 1024
"""Most seeds of one GenerationInput."""


class MalformedOutput(ValueError):
    """A message that does not hold together; the text is what was sent, as in "3 tokens with version spans over 2"."""


@dataclass(frozen=True)
class Chunk:
    """What one GenerationOutput adds to its sample. All arrays are along the n new tokens; n may be 0."""

    token_ids: np.ndarray
    """int32 [n]."""
    logprobs: np.ndarray
    """float32 [n]: of each token, under the distribution that it was sampled from."""
    spans: tuple[tuple[int, int], ...]
    """(weight_version, num_tokens), together n; none of zero tokens."""
    top_token_ids: np.ndarray | None
    """int32 [n, k] when the request asked for the k most probable tokens."""
    top_logprobs: np.ndarray | None
    """float32 [n, k]."""
    finish: pb.GenerationFinish | None
    """How the sample ended; None while it goes on."""
    routing: np.ndarray | None = None
    """uint8 or int16 [rows, num_moe_layers, top_k]: the next rows of the sample's routing, see paceline.routing."""

    @property
    def fault(self) -> str:
        """What no engine can mean though the sizes fit: why these tokens cannot be trained on. Empty: nothing."""
        if not np.isfinite(self.logprobs).all():
            return "a sampler log-probability is not finite"
        if any(version < 1 for version, _ in self.spans):
            return f"weight versions {list(self.spans)} hold one below 1"
        if self.token_ids.size and self.token_ids.min() < 0:
            return f"token id {self.token_ids.min()} is negative"
        return ""


def read_output(output: pb.GenerationOutput) -> Chunk:
    """Decode a message. MalformedOutput names the two sizes that differ.

    Only a message that ends a sample may come without tokens.
    """
    finish = output.finish if output.HasField("finish") else None
    spans = tuple((span.weight_version, span.num_tokens) for span in output.version_spans if span.num_tokens)
    if not output.HasField("token_ids"):
        if finish is None or spans:
            raise MalformedOutput("a message without token_ids")
        return Chunk(np.zeros(0, np.int32), np.zeros(0, np.float32), (), None, None, finish)
    try:
        tokens = arrays.from_wire(output.token_ids, "token_ids", "int32", math.prod(output.token_ids.shape))
        logprobs = arrays.from_wire(output.sampler_logprobs, "sampler_logprobs", "float32", tokens.size)
        top_ids, tops = _top(output, tokens.size)
        routing = _routing(output)
    except ValueError as error:
        raise MalformedOutput(f"a malformed message: {error}") from error
    spanned = sum(count for _, count in spans)
    if spanned != tokens.size or any(count < 0 for _, count in spans):
        raise MalformedOutput(f"{tokens.size} tokens with version spans over {spanned}")
    return Chunk(tokens, logprobs, spans, top_ids, tops, finish, routing)


def _top(output: pb.GenerationOutput, count: int) -> tuple[np.ndarray | None, np.ndarray | None]:
    if not output.HasField("top_token_ids") or not count:
        return None, None
    ids = arrays.from_wire(output.top_token_ids, "top_token_ids", "int32")
    logprobs = arrays.from_wire(output.top_logprobs, "top_logprobs", "float32")
    if ids.ndim != 2 or len(ids) != count or ids.shape != logprobs.shape:
        raise ValueError(f"top_token_ids of shape {list(ids.shape)} and top_logprobs of {list(logprobs.shape)} "
                         f"are not both [{count}, k]")  # fmt: skip
    return ids, logprobs


def _routing(output: pb.GenerationOutput) -> np.ndarray | None:
    if not output.HasField("routing"):
        return None
    found = arrays.from_wire(output.routing, "routing")
    if found.ndim != 3 or found.dtype not in ROUTING_DTYPES:
        raise ValueError(f"routing is {found.dtype} of shape {list(found.shape)}, not uint8 or int16 [rows, layers, k]")
    return found


def join_spans(spans: list[tuple[int, int]], more: Iterable[tuple[int, int]]) -> None:
    """Append version spans to those of the tokens before; neighbours of one version become one."""
    for version, count in more:
        if spans and spans[-1][0] == version:
            spans[-1] = (version, spans[-1][1] + count)
        elif count:
            spans.append((version, count))


def without_first(
    output: pb.GenerationOutput, chunk: Chunk, num_tokens: int, num_characters: int, num_rows: int = 0
) -> pb.GenerationOutput:
    """A copy of a message, whose `chunk` this is, without its first tokens, characters of text and rows of routing."""
    rest = pb.GenerationOutput()
    rest.CopyFrom(output)
    rest.text = output.text[num_characters:]
    if chunk.routing is not None and num_rows:
        rest.routing.CopyFrom(arrays.to_wire(chunk.routing[num_rows:]))
    if not num_tokens:
        return rest
    rest.token_ids.CopyFrom(arrays.to_wire(chunk.token_ids[num_tokens:]))
    rest.sampler_logprobs.CopyFrom(arrays.to_wire(chunk.logprobs[num_tokens:]))
    if chunk.top_token_ids is not None and chunk.top_logprobs is not None:
        rest.top_token_ids.CopyFrom(arrays.to_wire(chunk.top_token_ids[num_tokens:]))
        rest.top_logprobs.CopyFrom(arrays.to_wire(chunk.top_logprobs[num_tokens:]))
    del rest.version_spans[:]
    left = num_tokens
    for version, count in chunk.spans:
        dropped = min(left, count)
        left -= dropped
        if count > dropped:
            rest.version_spans.append(sample_pb2.VersionSpan(weight_version=version, num_tokens=count - dropped))
    return rest
