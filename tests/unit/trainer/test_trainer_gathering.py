"""From datums to the flat tokens of a micro-batch, and the weights of an update."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from services.trainer.datum import Datum, InvalidDatum
from services.trainer.gathering import gather_tokens, gather_topk_ids, groups_of
from services.trainer.step.aggregation import denominators


def datum(name: str, length: int, **fields: np.ndarray | None) -> Datum:
    start = 100 * int(name[-1])
    ramp = np.arange(start, start + length, dtype=np.float32)
    weights = np.ones(length, np.float32)
    weights[0] = 0
    return Datum(np.arange(length, dtype=np.int32), weights, ramp, ramp + 0.5, name=name, **fields)  # type: ignore[arg-type]


def gather(data: list[Datum], datum_index: list[int], token_index: list[int], **given: torch.Tensor) -> object:
    logprobs = torch.zeros(len(datum_index), dtype=torch.float64, requires_grad=True)
    groups = groups_of([data[:2], data[2:]])
    return gather_tokens(data, np.array(datum_index), np.array(token_index), groups, logprobs, **given)  # type: ignore[arg-type]


def test_tokens_know_their_sequence_and_sequences_their_group() -> None:
    data = [datum(f"d{i}", 4) for i in range(4)]
    batch = gather(data, [3, 1, 3, 1, 1], [2, 1, 3, 2, 3])
    assert batch.advantages.tolist() == [302, 101, 303, 102, 103]  # type: ignore[attr-defined]
    assert batch.sequences.tolist() == [1, 0, 1, 0, 0] and batch.num_sequences == 2  # type: ignore[attr-defined]
    assert batch.groups.tolist() == [0, 1]  # type: ignore[attr-defined]


def test_a_datum_without_behaviour_takes_the_policy_and_leaves_the_others_theirs() -> None:
    """Whether the first datum has a field says nothing about the others."""
    data = [datum("d0", 3), datum("d1", 3, behaviour_logprobs=np.full(3, -2, np.float32)), datum("d2", 3)]
    batch = gather(data, [0, 1, 2], [1, 1, 1])
    assert batch.behaviour_logprobs.tolist() == [0, -2, 0]  # type: ignore[attr-defined]
    assert not batch.behaviour_logprobs.requires_grad  # type: ignore[attr-defined]


def test_an_optional_field_is_there_for_all_or_for_none() -> None:
    values = np.ones(3, np.float32)
    data = [datum("d0", 3, values=values), datum("d1", 3), datum("d2", 3, values=values)]
    assert gather(data, [0, 2], [1, 1]).values.tolist() == [1, 1]  # type: ignore[attr-defined]
    assert gather(data, [1, 1], [1, 2]).values is None  # type: ignore[attr-defined]
    with pytest.raises(InvalidDatum, match="d1 has no values, but others of its micro-batch have"):
        gather(data, [0, 1], [1, 1])


def test_topk_ids_go_with_their_tokens() -> None:
    ids = np.arange(12, dtype=np.int32).reshape(4, 3)
    logprobs = -ids.astype(np.float32) / 10 - 1
    data = [datum(f"d{i}", 4, teacher_topk_ids=ids + 20 * i, teacher_topk_logprobs=logprobs) for i in range(2)]
    found = gather_topk_ids(data, np.array([1, 0]), np.array([1, 3]), "cpu")
    assert found.tolist() == [[23, 24, 25], [9, 10, 11]]
    batch = gather(data, [1, 0], [1, 3])
    np.testing.assert_allclose(batch.teacher_topk_logprobs, logprobs[[1, 3]])  # type: ignore[attr-defined]
    with pytest.raises(InvalidDatum, match="needs teacher_topk_ids"):
        gather_topk_ids([datum("d0", 3)], np.array([0]), np.array([1]), "cpu")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": np.zeros(3, np.float32)}, "values has shape"),
        ({"teacher_logprobs": np.full(4, np.nan, np.float32)}, "teacher_logprobs holds a value that is not finite"),
        ({"teacher_topk_ids": np.zeros((4, 2), np.int32)}, r"the shapes \[4, 2\] and None"),
        (
            {"teacher_topk_ids": np.full((4, 2), 99, np.int32), "teacher_topk_logprobs": np.zeros((4, 2), np.float32)},
            "teacher's token id 99 is outside the vocabulary of 10",
        ),
    ],
)
def test_wrong_optional_fields_are_refused_by_name(fields: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(InvalidDatum, match=message):
        datum("d0", 4, **fields).check(10)


def test_the_constant_denominator_does_not_see_how_long_sequences_are() -> None:
    for counts in ([2, 0, 4], [3, 9, 0]):
        found = denominators(counts, "constant", 16)
        assert (found.token_weights.tolist(), found.denominator) == ([1.0, 1.0, 1.0], 32)
    assert denominators([0, 0], "constant", 16).denominator == 0
    with pytest.raises(ValueError, match="needs the length"):
        denominators([1], "constant")
