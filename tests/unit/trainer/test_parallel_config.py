"""Layouts that cannot be are refused with the numbers; keys that the backend does not use, by name."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from paceline.config.trainer import TrainerConfig


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"parallel": {"ranks": 2}}, "parallel.ranks = 2 has no effect with backend = 'torch'"),
        ({"backend": "fsdp", "parallel": {"tensor": 2}}, "parallel.tensor = 2 has no effect with backend = 'fsdp'"),
        (
            {"backend": "fsdp", "parallel": {"ranks": 6, "replicate": 2, "shard": 2}},
            "replicate 2 x shard 2 is not ranks 6",
        ),
        ({"backend": "fsdp", "parallel": {"ranks": 3, "replicate": 2}}, "replicate 2 x shard 1 is not ranks 3"),
        (
            {"backend": "megatron", "parallel": {"ranks": 6, "tensor": 2, "pipeline": 2}},
            "tensor 2 x pipeline 2 x context 1 = 4 does not divide ranks 6",
        ),
        ({"backend": "megatron", "lora": {"rank": 2}}, "lora: backend = 'megatron' trains all parameters"),
        ({"backend": "fsdp", "parallel": {"cpu_offload": True}}, "cpu_offload = true has no effect on device = 'cpu'"),
    ],
)
def test_impossible_layouts(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError) as error:
        TrainerConfig.model_validate(fields)
    assert told in str(error.value)


def test_possible_layouts() -> None:
    TrainerConfig.model_validate({"backend": "fsdp", "parallel": {"ranks": 4, "replicate": 2}})
    TrainerConfig.model_validate({"backend": "megatron", "parallel": {"ranks": 8, "tensor": 2, "pipeline": 2}})
    TrainerConfig.model_validate({"parallel": {"activation_checkpointing": True}})
