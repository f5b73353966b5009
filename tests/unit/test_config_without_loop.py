"""A run file for clients that train by themselves needs a model and no data; what does not apply is refused."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.config import ConfigError, RunFile, parse
from paceline.config.kinds import services_of

RAW: dict[str, Any] = {"run": {"name": "n"}, "model": {"path": "m"}, "trainer": {"loop": False}}


def test_it_needs_no_data_and_starts_neither_rollout_nor_reward() -> None:
    config = parse(RAW)
    assert services_of(config) == ("coordinator", "dashboard", "engine", "router", "trainer", "gateway")


def test_a_resolved_one_can_be_read_again() -> None:
    config = parse({**RAW, "engine": {"max_sequence_length": 32}})
    again = RunFile.model_validate_json(config.model_dump_json())
    assert again.digest() == config.digest()
    assert "data" not in config.model_dump() and "rollout" not in config.model_dump()


@pytest.mark.parametrize(
    ("more", "key"),
    [
        ({"data": {"source": {"name": "jsonl", "path": "p"}}}, "data"),
        ({"rollout": {"groups_per_step": 4}}, "rollout"),
        ({"reward": {"graders": [{"name": "exact_match"}]}}, "reward"),
        ({"trainer": {"loop": False, "loss": {"name": "ppo"}}}, "trainer.loss"),
        ({"trainer": {"loop": False, "epochs_per_step": 2}}, "trainer.epochs_per_step"),
        ({"trainer": {"loop": False, "critic": {}}}, "trainer.critic"),
        ({"trainer": {"loop": False, "distillation": {}, "teachers": {"t": {"path": "t"}}}}, "trainer.distillation"),
        ({"trainer": {"loop": False, "async_checkpoints": True}}, "trainer.async_checkpoints"),
    ],
)
def test_what_only_a_loop_reads_is_refused(more: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"{key} does not apply with trainer.loop = false: clients train"):
        parse({**RAW, **more})
