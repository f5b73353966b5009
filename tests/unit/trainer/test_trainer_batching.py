"""Micro-batches, rows and denominators: arithmetic that must not depend on how a step is cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config.trainer import OptimizerConfig
from services.trainer.batching import plan_micro_batches
from services.trainer.datum import Datum
from services.trainer.packing import Row, common_prefix, pack, rows_of
from services.trainer.step.aggregation import denominators
from services.trainer.step.schedule import learning_rate

SHAPES = st.lists(st.tuples(st.integers(1, 8), st.integers(1, 60)), max_size=12)


def datum(ids: list[int], sampled: int, temperature: float = 1.0) -> Datum:
    count = len(ids)
    weights = np.array([0.0] * (count - sampled) + [1.0] * sampled, np.float32)
    zeros = np.zeros(count, np.float32)
    return Datum(np.array(ids, np.int32), weights, zeros, zeros, temperature)


@given(SHAPES, st.integers(1, 200))
def test_every_group_once_and_no_micro_batch_over_the_budget(shapes: list[tuple[int, int]], budget: int) -> None:
    plan = plan_micro_batches(shapes, budget)
    assert sorted(index for members in plan for index in members) == list(range(len(shapes)))
    for members in plan:
        tokens = sum(shapes[index][0] for index in members) * max(shapes[index][1] for index in members)
        assert tokens <= budget or len(members) == 1
    assert plan == plan_micro_batches(shapes, budget)


def test_a_group_over_the_budget_goes_alone() -> None:
    assert plan_micro_batches([(1, 4), (4, 30), (1, 4)], 50) == [[1], [0, 2]]


def test_common_prefix() -> None:
    assert common_prefix([datum([5, 6, 7], 1), datum([5, 6, 8, 9], 2)]) == 2
    assert common_prefix([datum([5, 6], 1), datum([5, 6, 8], 1)]) == 2
    assert common_prefix([datum([1], 0), datum([2], 0)]) == 0


def test_rows_share_a_prefix_only_where_that_is_cheaper() -> None:
    short = [datum([*range(1, 21), 30 + index], 1) for index in range(4)]
    assert rows_of(short, 3, hidden_size=64) == [Row((3, 4, 5, 6), 20, 24)]
    assert len(rows_of(short, 0, hidden_size=64, share_prefix=False)) == 4
    long = [datum([1, *([2 + index] * 400)], 400) for index in range(8)]
    assert len(rows_of(long, 0, hidden_size=16)) == 8


def test_a_packed_row_is_laid_out_and_masked_as_documented() -> None:
    data = [datum([7, 8, 1, 2], 2, 0.5), datum([7, 8, 3], 1)]
    batch = pack([Row((0, 1), 2, 5)], data)
    assert batch.token_ids.tolist() == [[7, 8, 1, 2, 3]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert batch.targets.tolist() == [1, 2, 3]
    assert batch.source.tolist() == [1, 2, 1]
    assert (batch.datum_index.tolist(), batch.token_index.tolist()) == ([0, 0, 1], [2, 3, 2])
    assert batch.temperature.tolist() == [0.5, 0.5, 1.0]
    assert batch.visible is not None
    assert batch.visible[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0],
        [1, 1, 0, 0, 1],
    ]


def test_rows_of_one_datum_need_no_mask_and_every_token_can_be_asked_for() -> None:
    data = [datum([4, 5, 6], 1), datum([9], 0)]
    batch = pack([Row((0,), 0, 3), Row((1,), 0, 1)], data, every_token=True)
    assert batch.visible is None
    assert batch.targets.tolist() == [5, 6] and batch.source.tolist() == [0, 1]


def test_a_stream_has_no_padding_and_predicts_the_same() -> None:
    data = [datum([7, 8, 1, 2], 2, 0.5), datum([7, 8, 3], 1), datum([4, 5, 6, 9, 2], 3), datum([6], 0)]
    rows = [Row((0, 1), 2, 5), Row((3,), 0, 1), Row((2,), 0, 5)]
    stream, padded = pack(rows, data, stream=True), pack(rows, data)
    assert stream.token_ids.tolist() == [[4, 5, 6, 9, 2, 6, 7, 8, 1, 2, 3]]
    assert stream.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 0, 1, 2, 3, 2]]
    assert stream.row_widths is not None and stream.row_widths.tolist() == [5, 1, 5]
    assert [None if item is None else item.tolist() for item in stream.row_segments] == [None, None, [0, 0, 1, 1, 2]]
    assert stream.visible is None
    found, wanted = (
        sorted(zip(b.datum_index, b.token_index, b.targets, b.token_ids.reshape(-1)[b.source], strict=True))
        for b in (stream, padded)
    )
    assert found == wanted


def test_denominators_written_out() -> None:
    counts = [2, 0, 4]
    assert denominators(counts, "token_mean").denominator == 6
    mean = denominators(counts, "seq_mean_token_mean")
    assert (mean.token_weights.tolist(), mean.denominator) == ([0.5, 0.0, 0.25], 2)
    total = denominators(counts, "seq_mean_token_sum")
    assert (total.token_weights.tolist(), total.denominator) == ([1.0, 1.0, 1.0], 2)
    assert denominators([0, 0], "token_mean").denominator == 0


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.7, 0.4, 0.1]),
        ("cosine", [0.5, 1.0, 0.775, 0.325, 0.1]),
    ],
)
def test_schedule(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=2, schedule=schedule, min_learning_rate=0.1)  # type: ignore[arg-type]
    assert [learning_rate(config, step, 5) for step in range(1, 6)] == pytest.approx(expected)


def test_schedule_without_warm_up_starts_at_the_full_rate() -> None:
    config = OptimizerConfig(learning_rate=1.0, schedule="linear")
    assert [learning_rate(config, step, 3) for step in (1, 2, 3)] == pytest.approx([1.0, 0.5, 0.0])
    assert learning_rate(config, 1, 1) == 1.0
