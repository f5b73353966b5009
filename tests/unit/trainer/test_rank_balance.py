"""The share of each rank: every group once, counts equal, the cap kept, and a balance that is no worse than greedy."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.trainer.batching import balance, plan_micro_batches, plan_ranks, plan_streams

SHAPES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 60)), max_size=16)


def tokens(shapes: list[tuple[int, int]]) -> list[float]:
    return [float(rows * width) for rows, width in shapes]


@given(SHAPES, st.integers(1, 300), st.integers(1, 5))
def test_every_group_once_counts_equal_cap_kept(shapes: list[tuple[int, int]], budget: int, ranks: int) -> None:
    plan = plan_ranks(plan_micro_batches(shapes, budget), tokens(shapes), ranks)
    assert len(plan) == ranks
    assert len({len(batches) for batches in plan}) == 1
    assert sorted(index for batches in plan for members in batches for index in members) == list(range(len(shapes)))
    for members in (members for batches in plan for members in batches if members):
        size = sum(shapes[index][0] for index in members) * max(shapes[index][1] for index in members)
        assert size <= budget or len(members) == 1
    for batches in plan:
        assert [bool(members) for members in batches] == sorted((bool(item) for item in batches), reverse=True)
    assert plan == plan_ranks(plan_micro_batches(shapes, budget), tokens(shapes), ranks)


@given(SHAPES, st.integers(1, 300), st.integers(1, 5))
def test_no_rank_idles_while_another_holds_groups_that_could_be_split(
    shapes: list[tuple[int, int]], budget: int, ranks: int
) -> None:
    plan = plan_ranks(plan_micro_batches(shapes, budget), tokens(shapes), ranks)
    batches = [members for rank in plan for members in rank]
    if any(not members for members in batches):
        assert all(len(members) <= 1 for members in batches)
    # No more micro-batches than the packing needs, but for the multiple of the ranks.
    assert len(batches) < len(plan_micro_batches(shapes, budget)) + ranks


@given(st.lists(st.integers(1, 60), max_size=16), st.integers(1, 200))
def test_streams_add_up(sizes: list[int], budget: int) -> None:
    plan = plan_streams(sizes, budget)
    assert sorted(index for members in plan for index in members) == list(range(len(sizes)))
    loads = [sum(sizes[index] for index in members) for members in plan]
    assert all(load <= budget or len(members) == 1 for load, members in zip(loads, plan, strict=True))
    # First-fit: no two micro-batches could have been one.
    assert all(one + other > budget for one, other in itertools.combinations(loads, 2))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=12), st.integers(1, 4))
def test_balance_is_within_the_bound_of_greedy(costs: list[float], parts: int) -> None:
    costs += [0.0] * (-len(costs) % parts)
    found = balance(costs, parts)
    assert sorted(index for part in found for index in part) == list(range(len(costs)))
    assert {len(part) for part in found} == {len(costs) // parts}
    largest = max(sum(costs[index] for index in part) for part in found)
    # Graham's bound for greedy assignment: at most the mean plus the largest item, here also with equal counts.
    assert largest <= sum(costs) / parts + max(costs) + 1e-6


@pytest.mark.parametrize("costs", [[8, 7, 6, 5, 4, 3], [9, 9, 1, 1, 1, 1], [5, 5, 4, 4, 3, 3, 3, 3]])
def test_balance_against_every_split(costs: list[float]) -> None:
    half = len(costs) // 2
    best = min(
        max(sum(costs[i] for i in chosen), sum(costs) - sum(costs[i] for i in chosen))
        for chosen in itertools.combinations(range(len(costs)), half)
    )
    found = balance(costs, 2)
    assert max(sum(costs[index] for index in part) for part in found) == best


def test_differencing_beats_greedy_where_greedy_fails() -> None:
    costs = [8.0, 7.0, 6.0, 5.0, 4.0, 4.0]
    assert max(sum(costs[index] for index in part) for part in balance(costs, 2)) == 17.0


def test_unequal_parts_are_refused() -> None:
    with pytest.raises(ValueError, match="3 items cannot be split into 2 equal parts"):
        balance([1, 2, 3], 2)
