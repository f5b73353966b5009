"""Backend fsdp on two gloo processes computes what backend torch computes in one, whatever the layout."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
from parity import Layout, Record

from services.trainer.backends.torch import TorchBackend

TOLERANCE = 1e-5
HYBRID = {"ranks": 2, "replicate": 2, "shard": 1}
SHARDED = {"ranks": 2}
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
REFERENCE = {"kl_coefficient": 0.1, "behaviour": "policy", "updates_per_step": 2}


@pytest.fixture(scope="module")
def layouts(tiny_model: Path, tied_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Layout]:
    plain, tied = str(tiny_model), str(tied_model)
    state = str(tmp_path_factory.mktemp("state") / "sharded")
    alone = str(tmp_path_factory.mktemp("alone") / "one")
    backend = TorchBackend(tiny_model, Layout("", plain, "torch").config(), 0)
    parity._train(backend, Layout("", plain, "torch", save=alone, steps=2))
    small = {"tokens_per_micro_batch": 16}
    return [
        *(Layout(name, plain, "fsdp", SHARDED, {"aggregation": name}) for name in AGGREGATIONS),
        Layout("gradients 2x1", plain, "fsdp", HYBRID, small),
        Layout("gradients 1x2", tied, "fsdp", {**SHARDED, "balance": "flops"}, {**small}),
        Layout("reference", tied, "fsdp", HYBRID, REFERENCE),
        Layout("checkpointing", plain, "fsdp", {**SHARDED, "activation_checkpointing": True}, small),
        Layout("bfloat16", plain, "fsdp", SHARDED, {"dtype": "bfloat16", "tokens_per_micro_batch": 10}),
        Layout("half", plain, "fsdp", SHARDED, save=state, steps=2),
        Layout("half again", plain, "fsdp", SHARDED, load=state, steps=1, first_step=3),
        Layout("half on copies", plain, "fsdp", HYBRID, load=state, steps=1, first_step=3),
        Layout("half of one", plain, "fsdp", SHARDED, load=alone, steps=1, first_step=3),
        Layout("whole", plain, "fsdp", SHARDED),
    ]


@pytest.fixture(scope="module")
def records(layouts: list[Layout], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    return parity.launch(tmp_path_factory.mktemp("launch"), 2, layouts)


EQUAL = [*AGGREGATIONS, "gradients 2x1", "gradients 1x2", "reference", "checkpointing"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", EQUAL)
def test_layouts_agree_with_one_process(layouts: list[Layout], records: dict[str, Record], name: str) -> None:
    layout = next(item for item in layouts if item.name == name)
    found = parity.difference(parity.reference(layout), records[name])
    assert max(found.values()) < TOLERANCE, found
    assert {"loss", "grad_norm", "entropy", "weights", "logprobs"} <= found.keys()


def test_bfloat16_has_float32_masters(layouts: list[Layout], records: dict[str, Record]) -> None:
    """With the same micro-batches, as bfloat16 shows the shape of a row in its last bits."""
    layout = next(item for item in layouts if item.name == "bfloat16")
    found = parity.difference(parity.reference(layout), records["bfloat16"])
    assert found["loss"] < TOLERANCE and found["grad_norm"] < TOLERANCE, found
    assert records["bfloat16"].values[0]["grad_norm"] != records["token_mean"].values[0]["grad_norm"]


@pytest.mark.parametrize("name", ["gradients 2x1", "gradients 1x2"])
def test_gradients_are_those_of_a_replica_and_the_same_bits_on_all_ranks(records: dict[str, Record], name: str) -> None:
    facts = records[name].facts
    assert set(facts) == {0, 1}
    for rank in (0, 1):
        assert facts[rank]["error"] < 2e-6 * max(1.0, facts[rank]["size"]), facts
        assert facts[rank]["weights"] == facts[rank]["weights_before"]
    assert facts[0]["gradient"] == facts[1]["gradient"]
    assert facts[0]["weights"] == facts[1]["weights"]


def test_a_resumed_layout_is_the_uninterrupted_one_bit_for_bit(records: dict[str, Record]) -> None:
    whole, resumed = records["whole"], records["half again"]
    assert records["half"].values + resumed.values == whole.values
    assert all((resumed.weights[name] == item).all() for name, item in whole.weights.items())


@pytest.mark.parametrize("name", ["half on copies", "half of one"])
def test_a_state_loads_in_another_layout(records: dict[str, Record], name: str) -> None:
    whole, other = records["whole"], records[name]
    found = parity.difference(Record(whole.values[2:], whole.logprobs, whole.weights), other)
    assert max(found.values()) < TOLERANCE, found


def test_one_process_loads_what_ranks_wrote(layouts: list[Layout], records: dict[str, Record]) -> None:
    layout = next(item for item in layouts if item.name == "half again")
    whole = records["whole"]
    found = parity.difference(Record(whole.values[2:], whole.logprobs, whole.weights), parity.reference(layout))
    assert max(found.values()) < TOLERANCE, found


def test_the_format_is_that_of_torch_distributed_checkpoint(layouts: list[Layout], records: dict[str, Record]) -> None:
    import torch
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    folder = Path(next(item for item in layouts if item.name == "half").save) / "parameters"
    assert len(list(folder.iterdir())) == 2
    found = {name: torch.zeros(item.shape) for name, item in records["half"].weights.items()}
    load(found, storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    assert all((found[name].numpy() == item).all() for name, item in records["half"].weights.items())
