"""Backend megatron on gloo processes computes what backend torch computes in one, whatever the layout."""

from __future__ import annotations

import dataclasses
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
REFERENCE = {
    "kl_coefficient": 0.1, "behaviour": "policy", "updates_per_step": 2, "entropy_coefficient": 0.01,
    # The gradient of the first KL to the reference is 0 but for rounding, which a small eps would blow up to a step.
    "optimizer": {"learning_rate": 1e-3, "eps": 1e-3, "weight_decay": 0.1},
}  # fmt: skip
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


def layout(name: str, model: str, parallel: dict, fields: dict | None = None, **others: object) -> Layout:
    return Layout(name, model, "megatron", parallel, fields or SMALL, **others)  # type: ignore[arg-type]


def quick(models: dict[str, str], state: str) -> list[Layout]:
    """One layout of each kind, and states that move between them; `state` + "-torch" is one of backend torch."""
    moved: dict = {"load": state, "steps": 1, "first_step": 3}
    return [
        layout("tensor", models["llama"], TENSOR, {**SMALL, **REFERENCE}),
        layout("pipeline", models["qwen2"], PIPELINE),
        layout("data", models["qwen3"], DATA),
        layout("context", models["qwen3"], CONTEXT, {"tokens_per_micro_batch": 64, **REFERENCE}),
        layout("expert", models["qwen3_moe"], EXPERT),
        layout("two steps", models["llama"], TENSOR, save=state, steps=2),
        layout("resumed", models["llama"], TENSOR, **moved),
        layout("resumed on data", models["llama"], DATA, **moved),
        layout("resumed on pipeline", models["llama"], PIPELINE, **moved),
        layout("resumed from torch", models["llama"], TENSOR, **{**moved, "load": f"{state}-torch"}),
        layout("whole", models["llama"], TENSOR),
    ]


def thorough(models: dict[str, str], states: Path) -> list[Layout]:
    """Every family in every layout of two ranks, and what else there is to turn on."""
    bfloat16 = {**SMALL, "dtype": "bfloat16"}
    experts, moved = models["qwen3_moe"], {"steps": 1, "first_step": 3}
    found = [
        layout(f"{name} {kind}", model, parallel)
        for name, model in models.items()
        for kind, parallel in (("tp", SEQUENCE), ("pp", PIPELINE), ("dp", DATA), ("cp", CONTEXT))
    ]
    return [
        *found,
        *(layout(f"{name} tp without sp", models[name], TENSOR) for name in ("qwen2", "qwen3")),
        layout("one batch for two", models["llama"], DATA, {"tokens_per_micro_batch": 4096}),
        layout("flops", models["llama"], {**DATA, "balance": "flops"}),
        layout("recomputed", models["qwen3"], {**TENSOR, "activation_checkpointing": True}),
        layout("recomputed in a pipeline", experts, {**PIPELINE, "activation_checkpointing": True}),
        layout("sequence losses", models["llama"], PIPELINE, {"loss": {"name": "gspo"}, **SMALL}),
        layout("bf16 tp", models["llama"], TENSOR, bfloat16),
        layout("bf16 dp", models["llama"], DATA, bfloat16),
        layout("bf16 half", models["llama"], DATA, bfloat16, steps=2, save=str(states / "bf16")),
        layout("bf16 resumed", models["llama"], DATA, bfloat16, load=str(states / "bf16"), **moved),
        layout("experts", experts, EXPERT, steps=2, save=str(states / "experts")),
        layout("experts resumed", experts, EXPERT, load=str(states / "experts"), **moved),
        layout("experts on data", experts, DATA, load=str(states / "experts"), **moved),
        layout("experts on tensor", experts, SEQUENCE, load=str(states / "experts"), **moved),
        layout("experts on pipeline", experts, PIPELINE, load=str(states / "experts"), **moved),
    ]


def on_four(models: dict[str, str]) -> list[Layout]:
    """Products of two ways of sharing."""
    four = {"ranks": 4}
    return [
        layout("tp2 pp2", models["qwen2"], {**four, **TENSOR, **PIPELINE, **four}),
        layout("tp2 dp2", models["llama"], {**TENSOR, **four}),
        layout("tp2 cp2", models["qwen3"], {**SEQUENCE, **CONTEXT, **four}),
        layout("pp2 cp2", models["llama"], {**PIPELINE, **CONTEXT, **four}),
        layout("cp2 dp2", models["qwen3"], {**CONTEXT, **four}),
        layout("ep2 dp2", models["qwen3_moe"], {**EXPERT, **four}),
        layout("ep2 tp2", models["qwen3_moe"], {**EXPERT, **SEQUENCE, **four}),
        layout("ep2 pp2", models["qwen3_moe"], {**EXPERT, **PIPELINE, **four}),
        layout("ep4", models["qwen3_moe"], {"expert": 4, **four}),
    ]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("state") / "two-steps")


@pytest.fixture(scope="module")
def records(models: dict[str, str], state: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    parity.reference(layout("two steps of torch", models["llama"], {}, save=f"{state}-torch", steps=2))
    return parity.launch(tmp_path_factory.mktemp("quick"), 2, quick(models, state))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["tensor", "pipeline", "data", "context", "expert"])
def test_layouts_agree_with_one_process(models: dict, state: str, records: dict[str, Record], name: str) -> None:
    agrees(named(quick(models, state), name), records[name])


@pytest.mark.timeout(300)
def test_a_resumed_layout_is_the_uninterrupted_one_bit_for_bit(records: dict[str, Record]) -> None:
    whole, resumed = records["whole"], records["resumed"]
    assert records["two steps"].values + resumed.values == whole.values
    assert all((resumed.weights[name] == item).all() for name, item in whole.weights.items())


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ["resumed on data", "resumed on pipeline", "resumed from torch"])
def test_a_state_loads_in_another_layout(records: dict[str, Record], name: str) -> None:
    whole = records["whole"]
    found = parity.difference(Record(whole.values[2:], whole.logprobs, whole.weights), records[name])
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.timeout(300)
def test_backend_torch_loads_what_ranks_wrote(models: dict, state: str, records: dict[str, Record]) -> None:
    whole = records["whole"]
    alone = parity.reference(named(quick(models, state), "resumed"))
    found = parity.difference(Record(whole.values[2:], whole.logprobs, whole.weights), alone)
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.timeout(300)
def test_each_rank_writes_its_share_of_a_state(state: str, records: dict[str, Record]) -> None:
    assert records
    sizes = [path.stat().st_size for path in sorted(Path(state, "parameters").iterdir())]
    assert len(sizes) == 2 and max(sizes) < 3 * min(sizes), sizes


@pytest.mark.timeout(300)
def test_a_vocabulary_over_two_ranks_has_the_gradients_of_a_whole_one(records: dict[str, Record]) -> None:
    for rank in (0, 1):
        errors = records["tensor"].facts[rank]
        assert set(errors) == {"logprobs", "entropy", "hidden", "head"}
        assert max(errors.values()) < 1e-12, errors


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_layouts_of_two_ranks(models: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "LAUNCH_SECONDS", 800)
    layouts = thorough(models, tmp_path / "states")
    found = parity.launch(tmp_path / "launch", 2, layouts)
    for item in layouts:
        if item.name.startswith("bf16"):
            continue
        if not item.load:
            agrees(item, found[item.name])
    for name in ("experts resumed", "experts on data", "experts on tensor", "experts on pipeline"):
        agrees(dataclasses.replace(named(layouts, "experts"), steps=3), after_two(found["experts"], found[name]))
    agrees(named(layouts, "experts resumed"), found["experts resumed"])
    assert found["bf16 half"].values + found["bf16 resumed"].values == found["bf16 dp"].values
    reference = parity.reference(named(layouts, "bf16 tp"))
    for name in ("bf16 tp", "bf16 dp"):
        gaps = parity.difference(reference, found[name])
        assert gaps["loss"] < 5e-3 and gaps["grad_norm"] < 5e-2, (name, gaps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_layouts_of_four_ranks(models: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parity, "LAUNCH_SECONDS", 800)
    layouts = on_four(models)
    found = parity.launch(tmp_path, 4, layouts)
    for item in layouts:
        agrees(item, found[item.name])


def agrees(wanted: Layout, record: Record) -> None:
    found = parity.difference(parity.reference(dataclasses.replace(wanted, save="")), record)
    # Under the last weights, whose differences they multiply.
    assert found.pop("logprobs") < 1e-4, (wanted.name, found)
    assert max(found.values()) < TOLERANCE, (wanted.name, found)
    assert {"loss", "grad_norm", "entropy", "weights"} <= found.keys()


def named(layouts: list[Layout], name: str) -> Layout:
    return next(item for item in layouts if item.name == name)


def after_two(first: Record, rest: Record) -> Record:
    return Record(first.values + rest.values, rest.logprobs, rest.weights)
