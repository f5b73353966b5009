"""A message of an engine is read the same everywhere: what does not fit is named with both sizes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as pb
from paceline.generation import MalformedOutput, join_spans, read_output, without_first


def message(
    tokens: list[int], spans: list[tuple[int, int]], logprobs: list[float] | None = None
) -> pb.GenerationOutput:
    output = pb.GenerationOutput(
        token_ids=arrays.to_wire(np.array(tokens, np.int32)),
        sampler_logprobs=arrays.to_wire(np.array(logprobs or [-1.0] * len(tokens), np.float32)),
        text="abc"[: len(tokens)],
    )  # fmt: skip
    for version, count in spans:
        output.version_spans.add(weight_version=version, num_tokens=count)
    return output


def test_a_whole_message() -> None:
    output = message([1, 2, 3], [(1, 1), (2, 0), (3, 2)])
    output.top_token_ids.CopyFrom(arrays.to_wire(np.zeros((3, 2), np.int32)))
    output.top_logprobs.CopyFrom(arrays.to_wire(np.zeros((3, 2), np.float32)))
    chunk = read_output(output)
    assert (chunk.token_ids.tolist(), chunk.logprobs.tolist(), chunk.spans) == ([1, 2, 3], [-1.0] * 3, ((1, 1), (3, 2)))
    assert chunk.top_token_ids is not None and chunk.top_token_ids.shape == (3, 2)
    assert chunk.finish is None and chunk.fault == ""
    rest = without_first(output, chunk, 2, 2)
    assert (rest.text, read_output(rest).token_ids.tolist(), read_output(rest).spans) == ("c", [3], ((3, 1),))


def test_only_an_end_may_come_without_tokens() -> None:
    end = pb.GenerationOutput(finish=pb.GenerationFinish(reason=pb.FINISH_REASON_ABORT))
    chunk = read_output(end)
    assert chunk.token_ids.size == 0 and chunk.finish is not None
    with pytest.raises(MalformedOutput, match="without token_ids"):
        read_output(pb.GenerationOutput(text="x"))


def test_sizes_that_differ_are_named() -> None:
    with pytest.raises(MalformedOutput, match="3 tokens with version spans over 2"):
        read_output(message([1, 2, 3], [(1, 2)]))
    with pytest.raises(MalformedOutput, match=r"sampler_logprobs: shape is \[1\], expected \[2\]"):
        read_output(message([1, 2], [(1, 2)], [-1.0]))
    with pytest.raises(MalformedOutput, match="spans over"):
        read_output(message([1, 2], [(1, 3), (2, -1)]))
    top = message([1, 2], [(1, 2)])
    top.top_token_ids.CopyFrom(arrays.to_wire(np.zeros((1, 4), np.int32)))
    top.top_logprobs.CopyFrom(arrays.to_wire(np.zeros((2, 4), np.float32)))
    with pytest.raises(MalformedOutput, match=r"\[1, 4\] .* \[2, 4\] are not both \[2, k\]"):
        read_output(top)


@pytest.mark.parametrize(
    ("tokens", "spans", "logprobs", "fault"),
    [
        ([1], [(1, 1)], [math.nan], "not finite"),
        ([1], [(0, 1)], [-1.0], "below 1"),
        ([-4], [(1, 1)], [-1.0], "token id -4"),
    ],
)
def test_values_that_nothing_can_mean_are_a_fault(
    tokens: list[int], spans: list[tuple[int, int]], logprobs: list[float], fault: str
) -> None:
    assert fault in read_output(message(tokens, spans, logprobs)).fault


def test_neighbours_of_one_version_are_one_span() -> None:
    spans: list[tuple[int, int]] = []
    for more in ([(1, 2)], [(1, 1), (2, 3)], []):
        join_spans(spans, more)
    assert spans == [(1, 3), (2, 3)]
