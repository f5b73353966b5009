"""Ranks of backend fsdp replay routing as one process of backend torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity
import pytest
from parity import Layout
from tiny_moe import save_moe

REPLAY: dict[str, Any] = {"routing_replay": True, "tokens_per_micro_batch": 64}
CHECKPOINTED = {"ranks": 2, "activation_checkpointing": True}


@pytest.mark.timeout(300)
def test_replay_on_two_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    model = str(save_moe(tmp_path / "moe", dense_layers=()))
    layouts = [
        Layout("shard", model, "fsdp", {"ranks": 2}, REPLAY),
        Layout("replicate", model, "fsdp", {"replicate": 2, **CHECKPOINTED}, REPLAY),
    ]
    records = parity.launch(tmp_path / "ranks", 2, layouts)
    one = parity.reference(layouts[0])
    for layout in layouts:
        found = parity.difference(one, records[layout.name])
        assert max(found.values()) < 1e-5, (layout.name, found)
        assert found["routing_disagreement"] == 0
    assert one.values[0]["routing_disagreement"] > 0.3
