"""What backend megatron works around: each fix, and that without it the error it is for is there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity
import pytest
import torch
import torch.distributed as dist
import transformers
from parity import Layout

from paceline.config import ConfigError
from paceline.plugins import registry
from services.trainer.backends.megatron import MegatronBackend

WITH_DECAY = {"optimizer": {"learning_rate": 1e-3, "eps": 1e-3, "weight_decay": 10.0}}


@pytest.fixture(autouse=True)
def groups() -> Iterator[None]:
    """Process groups of a test end with it."""
    yield
    if dist.is_initialized():
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in registry("model_family").available():
        torch.manual_seed(7)
        found[name] = tmp_path_factory.mktemp(name)
        config = registry("model_family").load(name).tiny()
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(found[name])
    return found


def layout(path: Path, fields: dict | None = None) -> Layout:
    return Layout("one", str(path), "megatron", {}, fields or {}, steps=1)


def trained(path: Path, fields: dict | None = None) -> parity.Record:
    item = layout(path, fields)
    return parity._train(MegatronBackend(path, item.config(), 0), item)


@pytest.mark.parametrize("family", registry("model_family").available())
def test_logprobs_are_those_of_transformers_and_weights_come_back(models: dict[str, Path], family: str) -> None:
    backend = MegatronBackend(models[family], layout(models[family]).config(), 0)
    model = transformers.AutoModelForCausalLM.from_pretrained(models[family])
    weights = backend.weights()
    wanted = dict(model.named_parameters())
    assert weights.keys() == wanted.keys()
    assert all(torch.equal(weights[name], item) for name, item in wanted.items())
    groups = parity.groups_of_a11(backend.vocabulary)
    for group, found in zip(groups, backend.forward(groups), strict=True):
        for datum, logprobs in zip(group, found, strict=True):
            ids = torch.from_numpy(datum.token_ids).long().unsqueeze(0)
            with torch.no_grad():
                plain = (model(ids).logits[0, :-1] / datum.temperature).log_softmax(-1)
            chosen = plain.gather(1, ids[0, 1:, None])[:, 0]
            torch.testing.assert_close(torch.from_numpy(logprobs[1:]), chosen, rtol=0, atol=1e-4)


def test_an_export_is_a_whole_model_folder(models: dict[str, Path], tmp_path: Path) -> None:
    backend = MegatronBackend(models["qwen3_moe"], layout(models["qwen3_moe"]).config(), 0)
    backend.export(tmp_path)
    one, other = (transformers.AutoModelForCausalLM.from_pretrained(path) for path in (models["qwen3_moe"], tmp_path))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_vectors_are_not_decayed(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from services.trainer.megatron import updates

    wanted = parity.reference(layout(models["llama"], WITH_DECAY))
    assert parity.difference(wanted, trained(models["llama"], WITH_DECAY))["weights"] < 1e-5
    monkeypatch.setattr(updates, "set_weight_decay", lambda optimizer, value: None)
    assert parity.difference(wanted, trained(models["llama"], WITH_DECAY))["weights"] > 1e-3


def test_the_router_of_experts_runs_without_transformer_engine(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core.transformer.moe import moe_utils

    from services.trainer.megatron import backend

    trained(models["qwen3_moe"])
    monkeypatch.delattr(moe_utils, "te_general_gemm")
    monkeypatch.setattr(backend, "define_missing_gemm", lambda: None)
    with pytest.raises(NameError, match="te_general_gemm"):
        trained(models["qwen3_moe"])


def test_parts_of_parameters_are_marked(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    from services.trainer.megatron import parameters

    def marked() -> set[bool]:
        backend = MegatronBackend(models["llama"], layout(models["llama"]).config(), 0)
        entries = [entry for entry in backend.replica.entries if entry.rule.cut is not None]
        return {bool(getattr(entry.parameter, "tensor_model_parallel", False)) for entry in entries}

    assert marked() == {True}
    monkeypatch.setattr(parameters, "mark_shared", lambda parameter, axis: None)
    assert marked() == {False}


def test_norms_may_stand_between_sequence_parallel_regions(models: dict[str, Path]) -> None:
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from services.trainer.megatron.compat import Norm
    from services.trainer.megatron.cpu import host_devices

    MegatronBackend(models["llama"], layout(models["llama"]).config(), 0)
    config: Any = transformers.PretrainedConfig(
        sequence_parallel=True, params_dtype=torch.float32, layernorm_zero_centered_gamma=False,
        persist_layer_norm=False, memory_efficient_layer_norm=False, normalization="RMSNorm",
    )  # fmt: skip
    with host_devices():
        assert Norm(config, 8).weight.sequence_parallel is True
        with pytest.raises(AssertionError, match="sequence parallel not supported"):
            WrappedTorchNorm(config, 8)


def test_the_host_stands_for_cuda_inside_of_the_shim_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from services.trainer.megatron.cpu import ShimRefused, devices, host_devices

    with host_devices():
        assert torch.cuda.current_device() == torch.device("cpu")
        assert torch.zeros(2, device="cuda").cuda().to("cuda").device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        torch.zeros(2, device="cuda")
    with pytest.raises((RuntimeError, AssertionError), match="CUDA"):
        torch.cuda.current_device()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ShimRefused, match="device"), host_devices():
        pass
    with devices("cuda"):
        pass


@pytest.mark.parametrize(
    ("family", "fields", "parallel", "told"),
    [
        ("llama", {"num_query_groups": 2}, {"tensor": 4}, "num_key_value_heads of 2"),
        ("llama", {"num_layers": 3}, {"pipeline": 2}, "num_hidden_layers of 3"),
        ("llama", {}, {"expert": 2}, "has no experts"),
        ("qwen3_moe", {}, {"tensor": 2}, "sequence_parallel = true"),
        ("llama", {}, {"sequence_parallel": True}, "no effect"),
    ],
)
def test_what_cannot_be_shared_is_refused_with_its_numbers(
    family: str, fields: dict, parallel: dict, told: str
) -> None:
    from paceline.config.trainer import ParallelConfig
    from services.trainer.megatron.layout import check_layout

    config = registry("model_family").load(family).tiny()
    known = {**registry("model_family").load(family)(config).fields(), **fields}
    with pytest.raises(ConfigError, match=told):
        check_layout(ParallelConfig(**parallel), config, known)


@pytest.mark.parametrize(("kind", "known"), [("llama3", True), ("linear", True), ("yarn", False)])
def test_scaled_rotary_positions(tmp_path: Path, kind: str, known: bool) -> None:
    torch.manual_seed(1)
    config = registry("model_family").load("llama").tiny()
    config.rope_parameters = {
        "rope_type": kind, "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    if not known:
        with pytest.raises(ConfigError, match="rope_type is 'yarn'"):
            MegatronBackend(tmp_path, layout(tmp_path).config(), 0)
        return
    gaps = parity.difference(parity.reference(layout(tmp_path, WITH_DECAY)), trained(tmp_path, WITH_DECAY))
    assert max(gaps.values()) < 1e-5, gaps
