"""Text of a choice: complete characters only, no end-of-sequence token, nothing from a stop string on."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.tokenizer import Tokenizer
from services.gateway.choices import Choice, StopTrimmer, newest_version, usage
from services.gateway.edge import seeds_from

TOKENIZER = Tokenizer.load(Path(__file__).parents[2] / "assets" / "sort4")


def _output(tokens: list[int], reason: int = 0, version: int = 1) -> generation_pb.GenerationOutput:
    ids = np.array(tokens, np.int32)
    output = generation_pb.GenerationOutput(
        token_ids=arrays.to_wire(ids), sampler_logprobs=arrays.to_wire(np.zeros(len(ids), np.float32))
    )
    output.version_spans.add(weight_version=version, num_tokens=len(tokens))
    if reason:
        output.finish.reason = reason  # type: ignore[assignment]
    return output


@given(st.text("ab<", max_size=12), st.lists(st.integers(0, 12), max_size=4))
def test_a_trimmed_stream_is_the_text_before_the_first_stop(text: str, cuts: list[int]) -> None:
    trimmer = StopTrimmer(["ab<", "<<"])
    places = sorted({min(cut, len(text)) for cut in cuts} | {0, len(text)})
    shown = "".join(trimmer.push(text[a:b]) for a, b in itertools.pairwise(places)) + trimmer.finish()
    stops = [text.find(stop) for stop in ("ab<", "<<") if stop in text]
    assert shown == text[: min(stops, default=len(text))]


@pytest.mark.parametrize("together", [False, True])
def test_the_end_of_sequence_token_is_no_text(together: bool) -> None:
    choice = Choice(0, TOKENIZER)
    tokens = [*TOKENIZER.encode("ab"), 0]
    pieces = [tokens] if together else [[token] for token in tokens]
    for number, piece in enumerate(pieces):
        choice.push(_output(piece, generation_pb.FINISH_REASON_STOP if number == len(pieces) - 1 else 0))
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("ab", tokens, "stop")


def test_an_end_of_sequence_token_in_the_middle_is_text() -> None:
    choice = Choice(0, TOKENIZER)
    choice.push(_output([2, 0]))
    choice.push(_output([3], generation_pb.FINISH_REASON_LENGTH))
    assert choice.text == TOKENIZER.decode([2, 0, 3])


def test_spans_join_and_the_newest_version_counts() -> None:
    choice = Choice(0, TOKENIZER)
    choice.push(_output([2, 3], version=4))
    choice.push(_output([4], version=4))
    choice.push(_output([5], generation_pb.FINISH_REASON_STOP, version=5))
    assert choice.spans == [(4, 3), (5, 1)]
    assert newest_version([choice]) == 5
    assert usage(7, [choice, choice])["total_tokens"] == 15


def test_seeds_are_drawn_from_the_seed() -> None:
    assert seeds_from(1, 3) == seeds_from(1, 5)[:3]
    assert seeds_from(1, 3) != seeds_from(2, 3)
    assert seeds_from(None, 2) != seeds_from(None, 2)
    assert all(0 <= seed < 2**63 for seed in seeds_from(-5, 4))
