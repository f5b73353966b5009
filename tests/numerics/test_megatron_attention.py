"""The core attention that stands in for Transformer Engine's, and what each context rank's queries see."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from services.trainer.datum import Datum
from services.trainer.megatron.attention import CoreAttention, KernelPlan, PackedTokens
from services.trainer.megatron.stream import places_of, segments_of, stream_of

ALONE = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
HEADS, GROUPS, SIZE = 4, 2, 8


def attention() -> CoreAttention:
    return CoreAttention(None, SimpleNamespace(cp=ALONE))


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Causal attention of one sequence [t, heads, d], written out."""
    key, value = (item.repeat_interleave(HEADS // GROUPS, 1) for item in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) / SIZE**0.5
    visible = torch.ones(len(query), len(key), dtype=torch.bool).tril()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


def heads(*shape: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [
        torch.randn(*shape, count, SIZE, dtype=torch.float64, requires_grad=True) for count in (HEADS, GROUPS, GROUPS)
    ]


@pytest.mark.parametrize("lengths", [[7], [1, 5, 3], [4, 4, 1, 1]])
def test_packed_sequences_see_themselves_only(lengths: list[int]) -> None:
    bounds = np.cumsum([0, *lengths])
    parts = heads(int(bounds[-1]))
    packed = PackedTokens(qkv_format="thd", segments=segments_of(bounds, 0, 1))
    found = attention()(*parts, packed_seq_params=packed)
    wanted = torch.cat([
        plain(*(item[first:last] for item in parts)) for first, last in pairwise(bounds)
    ])  # fmt: skip
    torch.testing.assert_close(found, wanted)
    pull = torch.randn_like(wanted)
    for one, other in zip(
        torch.autograd.grad(found, parts, pull), torch.autograd.grad(wanted, parts, pull), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    query, key, value = heads(6, 2)
    found = attention()(query, key, value)
    assert found.shape == (6, 2, HEADS * SIZE)
    for row, length in ((0, 6), (1, 4)):
        wanted = plain(*(item[:length, row] for item in (query, key, value)))
        torch.testing.assert_close(found[:length, row], wanted.flatten(1))


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), ranks=st.sampled_from([1, 2, 3, 4]))
def test_context_ranks_see_together_what_one_rank_sees(lengths: list[int], ranks: int) -> None:
    zeros = [np.zeros(length, np.float32) for length in lengths]
    data = [Datum(np.arange(len(item), dtype=np.int32), item, item, item) for item in zeros]
    stream = stream_of(range(len(data)), data, True, 2 * ranks)
    total = len(stream.token_ids)
    seen: dict[int, tuple[int, int]] = {}
    for rank in range(ranks):
        places, segments = places_of(total, rank, ranks), segments_of(stream.bounds, rank, ranks)
        assert segments.queries[-1] == len(places) == total // ranks
        for number, (start, stop) in enumerate(zip(segments.key_starts, segments.key_stops, strict=True)):
            own = places[segments.queries[number] : segments.queries[number + 1]]
            for back, place in enumerate(own[::-1]):
                seen[int(place)] = (int(start), int(stop) - back)
    for place in range(total):
        first = int(stream.bounds[np.searchsorted(stream.bounds, place, side="right") - 1])
        assert seen[place] == (first, place + 1)


@settings(max_examples=40, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), ranks=st.sampled_from([1, 2, 3]))
def test_the_kernel_gets_the_keys_of_each_segment(lengths: list[int], ranks: int) -> None:
    total = -(-sum(lengths) // (2 * ranks)) * 2 * ranks
    bounds = np.unique([*np.cumsum([0, *lengths]), total])
    for rank in range(ranks):
        segments = segments_of(bounds, rank, ranks)
        plan = KernelPlan(segments, torch.device("cpu"))
        keys = torch.arange(total) if plan.chosen is None else plan.chosen
        for number, (start, stop) in enumerate(zip(segments.key_starts, segments.key_stops, strict=True)):
            found = keys[int(plan.keys[number]) : int(plan.keys[number + 1])]
            assert found.tolist() == list(range(start, stop))


def test_a_stream_predicts_the_tokens_with_a_weight_from_those_before() -> None:
    ids = [np.array([5, 6, 7], np.int32), np.array([8, 9], np.int32)]
    weights = [np.array([0, 0, 1], np.float32), np.array([0, 2], np.float32)]
    data = [Datum(one, weight, weight, weight, 0.5) for one, weight in zip(ids, weights, strict=True)]
    stream = stream_of([1, 0], data, False, 4)
    assert stream.token_ids.tolist() == [8, 9, 5, 6, 7, 0, 0, 0]
    assert stream.bounds.tolist() == [0, 2, 5, 8]
    assert stream.positions.tolist() == [0, 1, 0, 1, 2, 0, 1, 2]
    assert stream.token_ids[stream.source + 1].tolist() == stream.targets.tolist() == [9, 7]
    assert stream.datum_index.tolist() == [1, 0] and stream.token_index.tolist() == [1, 2]
    assert len(stream_of([], data, False, 4).token_ids) == 4
