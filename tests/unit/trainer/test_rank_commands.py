"""Calls reach the other ranks as data: whole, equal, and without pickle."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import services.trainer.ranks
from services.trainer.datum import Datum
from services.trainer.objective import Objective
from services.trainer.ranks.commands import decode, encode
from services.trainer.ranks.start import Seat

OBJECTIVE = Objective.from_spec({"loss": {"name": "ppo", "clip_low": 0.1}, "kl_coefficient": 0.5})


def datum(count: int, **fields: Any) -> Datum:
    values = np.linspace(-1, 1, count, dtype=np.float32)
    return Datum(np.arange(count, dtype=np.int32), values, values * 2, values * 3, 0.7, name="a", **fields)


def test_a_call_arrives_as_it_was_made() -> None:
    topk = np.arange(6, dtype=np.int32).reshape(3, 2)
    groups = [[datum(3, teacher_topk_ids=topk), datum(1)], [], [datum(5, behaviour_logprobs=np.ones(5, np.float32))]]
    call, (sent, objective, reference, path, number) = decode(
        encode("forward_backward", (groups, OBJECTIVE, True, Path("/a b"), float("inf")))
    )
    assert (call, reference, path, number) == ("forward_backward", True, Path("/a b"), float("inf"))
    assert objective.spec() == OBJECTIVE.spec()
    assert [len(group) for group in sent] == [2, 0, 1]
    for found, wanted in zip((d for g in sent for d in g), (d for g in groups for d in g), strict=True):
        for name, value in vars(wanted).items():
            np.testing.assert_array_equal(getattr(found, name), value)
            if isinstance(value, np.ndarray):
                assert getattr(found, name).dtype == value.dtype
    sent[0][0].weights[0] = 5.0  # a copy: a rank may change it


@pytest.mark.parametrize("value", [object(), np.array([object()]), {1, 2}, lambda: None])
def test_what_is_no_data_is_refused(value: object) -> None:
    with pytest.raises(TypeError, match="cannot be sent to the other ranks"):
        encode("forward", (value,))


def test_no_rank_unpickles_anything() -> None:
    for path in Path(services.trainer.ranks.__path__[0]).glob("*.py"):
        names = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not {name for name in names if "object" in name or "pickle" in name}, path


def test_another_number_of_ranks_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"4 ranks were started, but trainer\.parallel\.ranks = 2"):
        Seat.from_environment({"RANK": "1", "WORLD_SIZE": "4"}, 2)
    assert Seat.from_environment({}, 2) == Seat(0, 2, 0)
    started = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "x"}
    assert Seat.from_environment(started, 4) == Seat(3, 4, 1, True)
