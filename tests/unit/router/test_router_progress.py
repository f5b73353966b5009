"""A second attempt at a sample repeats what was sent; only what is new goes on, and what differs is noticed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from services.router.progress import Diverged, EngineFault, SampleProgress

STOP = generation_pb.FINISH_REASON_STOP


def _output(
    tokens: Sequence[int], spans: Sequence[tuple[int, int]] = (), end: bool = False, top: int = 0
) -> generation_pb.GenerationOutput:
    ids = np.array(tokens, np.int32)
    output = generation_pb.GenerationOutput(
        token_ids=arrays.to_wire(ids), sampler_logprobs=arrays.to_wire(-ids.astype(np.float32)),
        text="".join(f"<{token}>" for token in tokens),
    )  # fmt: skip
    for version, count in spans or [(1, len(tokens))]:
        output.version_spans.add(weight_version=version, num_tokens=count)
    if top:
        output.top_token_ids.CopyFrom(arrays.to_wire(np.repeat(ids[:, None], top, 1)))
        output.top_logprobs.CopyFrom(arrays.to_wire(np.zeros((len(tokens), top), np.float32)))
    if end:
        output.finish.reason = STOP
    return output


def _ids(output: generation_pb.GenerationOutput) -> list[int]:
    return arrays.from_wire(output.token_ids, "token_ids").tolist()


def test_the_repeated_part_is_left_out_of_every_array() -> None:
    sample = SampleProgress(0, 7)
    assert sample.accept(_output([1, 2, 3])) is not None
    sample.restart()
    assert sample.accept(_output([1, 2])) is None
    rest = sample.accept(_output([3, 4, 5], [(1, 2), (2, 1)], end=True, top=2))
    assert rest is not None
    assert _ids(rest) == [4, 5]
    assert arrays.from_wire(rest.sampler_logprobs, "sampler_logprobs").tolist() == [-4.0, -5.0]
    assert arrays.from_wire(rest.top_token_ids, "top_token_ids").tolist() == [[4, 4], [5, 5]]
    assert [(span.weight_version, span.num_tokens) for span in rest.version_spans] == [(1, 1), (2, 1)]
    assert rest.text == "<4><5>"
    assert sample.finished
    assert sample.sent == [1, 2, 3, 4, 5]


def test_an_end_at_the_place_where_the_first_attempt_stopped_is_sent() -> None:
    sample = SampleProgress(0, 7)
    sample.accept(_output([1, 2]))
    sample.restart()
    rest = sample.accept(_output([1, 2], end=True))
    assert rest is not None
    assert (_ids(rest), rest.text, rest.finish.reason) == ([], "", STOP)


@pytest.mark.parametrize(
    "second",
    [_output([1, 9]), _output([1, 2], [(2, 2)]), _output([1], end=True), _output([1, 2], [(1, 1), (2, 1)])],
    ids=["other tokens", "other weights", "shorter", "weights changed on the way"],
)
def test_a_difference_is_noticed(second: generation_pb.GenerationOutput) -> None:
    sample = SampleProgress(0, 7)
    sample.accept(_output([1, 2]))
    sample.restart()
    with pytest.raises(Diverged):
        sample.accept(second)


def test_a_sample_of_two_versions_cannot_be_repeated() -> None:
    sample = SampleProgress(0, 7)
    sample.accept(_output([1, 2], [(1, 1), (2, 1)]))
    assert not sample.repeatable


def test_tokens_after_the_end_are_a_fault() -> None:
    sample = SampleProgress(0, 7)
    sample.accept(_output([1], end=True))
    with pytest.raises(EngineFault, match="after its finish"):
        sample.accept(_output([2]))


def test_parts_of_different_length_are_a_fault_with_both_numbers() -> None:
    with pytest.raises(EngineFault, match="3 tokens with version spans over 2"):
        SampleProgress(0, 7).accept(_output([1, 2, 3], [(1, 2)]))
    short = _output([1, 2, 3])
    short.sampler_logprobs.CopyFrom(arrays.to_wire(np.zeros(2, np.float32)))
    with pytest.raises(EngineFault, match=r"\[2\], expected \[3\]"):
        SampleProgress(0, 7).accept(short)
    with pytest.raises(EngineFault, match="without token_ids"):
        SampleProgress(0, 7).accept(generation_pb.GenerationOutput(text="x"))
