"""Backend megatron on two gloo processes computes what backend torch computes in one, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
import torch
import transformers
from parity import Layout, Record

from paceline.plugins import registry

TOLERANCE = 1e-5
FAMILIES = registry("model_family").available()
SMALL = {"tokens_per_micro_batch": 32}
REFERENCE = {"kl_coefficient": 0.1, "behaviour": "policy", "updates_per_step": 2, "entropy_coefficient": 0.01}
TENSOR = {"ranks": 2, "tensor": 2}
SEQUENCE = {**TENSOR, "sequence_parallel": True}
PIPELINE = {"ranks": 2, "pipeline": 2}
DATA = {"ranks": 2}
CONTEXT = {"ranks": 2, "context": 2}
EXPERT = {"ranks": 2, "expert": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A tiny random model of each family."""
    found = {}
    for name in FAMILIES:
        torch.manual_seed(7)
        folder = tmp_path_factory.mktemp(name)
        config = registry("model_family").load(name).tiny()
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        found[name] = str(folder)
    return found


def quick(models: dict[str, str]) -> list[Layout]:
    """One layout of each kind."""
    return [
        Layout("tensor", models["llama"], "megatron", TENSOR, SMALL),
        Layout("pipeline", models["qwen2"], "megatron", PIPELINE, SMALL),
        Layout("data", models["qwen3"], "megatron", DATA, SMALL),
        Layout("context", models["qwen3"], "megatron", CONTEXT, {"tokens_per_micro_batch": 64, **REFERENCE}),
        Layout("expert", models["qwen3_moe"], "megatron", EXPERT, SMALL),
    ]


QUICK = ["tensor", "pipeline", "data", "context", "expert"]


@pytest.fixture(scope="module")
def quick_records(models: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    return parity.launch(tmp_path_factory.mktemp("quick"), 2, quick(models))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", QUICK)
def test_layouts_agree_with_one_process(models: dict[str, str], quick_records: dict[str, Record], name: str) -> None:
    layout = next(item for item in quick(models) if item.name == name)
    agrees(layout, quick_records[name])


def agrees(layout: Layout, record: Record) -> None:
    found = parity.difference(parity.reference(layout), record)
    assert max(found.values()) < TOLERANCE, found
    assert {"loss", "grad_norm", "entropy", "weights", "logprobs"} <= found.keys()
