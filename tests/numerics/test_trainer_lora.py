"""LoRA: a fresh adapter changes nothing, and what is published and exported is what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import peft
import safetensors.torch
import torch
import transformers
from tiny_policies import make_groups

from paceline.config.trainer import LoraConfig, TrainerConfig
from services.trainer.backends.torch import TorchBackend
from services.trainer.losses.ppo import Ppo
from services.trainer.objective import Objective

PPO = Objective(Ppo(Ppo.Options()))
GROUPS = make_groups([[3, 5], [4, 2]], [6, 9])


def adapted(path: Path, dtype: str = "float32", **fields: object) -> TorchBackend:
    config = TrainerConfig.model_validate({"lora": LoraConfig(rank=4, alpha=8), "dtype": dtype, **fields})
    return TorchBackend(path, config, 0)


def trained(path: Path, dtype: str = "float32") -> TorchBackend:
    subject = adapted(path, dtype)
    for _ in range(3):
        result = subject.forward_backward(GROUPS, PPO)
        subject.optim_step(result.num_tokens, 0.05)
    return subject


def logprobs_of(model: torch.nn.Module) -> list[np.ndarray]:
    found = []
    for datum in [datum for group in GROUPS for datum in group]:
        ids = torch.from_numpy(datum.token_ids.astype(np.int64)).unsqueeze(0)
        with torch.no_grad():
            logits = model(input_ids=ids).logits[0, :-1]
        found.append(logits.float().log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].numpy())
    return found


def own_logprobs(subject: TorchBackend) -> list[np.ndarray]:
    return [values[1:] for group in subject.forward(GROUPS) for values in group]


def test_a_fresh_adapter_changes_nothing_and_only_b_learns(tiny_model: Path) -> None:
    plain = TorchBackend(tiny_model, TrainerConfig(), 0)
    subject = adapted(tiny_model)
    for found, wanted in zip(own_logprobs(subject), own_logprobs(plain), strict=True):
        np.testing.assert_array_equal(found, wanted)
    subject.forward_backward(GROUPS, PPO)
    for name, item in subject.masters.tensors.items():
        assert item.dtype == torch.float32
        assert item.grad is not None
        assert bool(item.grad.any()) == ("lora_B" in name), name


def test_reference_is_the_base_without_the_adapter(tiny_model: Path) -> None:
    subject = trained(tiny_model)
    plain = TorchBackend(tiny_model, TrainerConfig(), 0)
    reference = subject.forward(GROUPS, reference=True)
    for found, wanted in zip(reference, plain.forward(GROUPS), strict=True):
        for one, other in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(one, other)
    assert not np.array_equal(subject.forward(GROUPS)[0][0], reference[0][0])


def test_published_adapter_loads_in_peft(tiny_model: Path, tmp_path: Path) -> None:
    subject = trained(tiny_model)
    safetensors.torch.save_file(
        {name: item.contiguous() for name, item in subject.weights().items()}, tmp_path / "adapter_model.safetensors"
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps(subject.adapter_config()))
    base = transformers.AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    for found, wanted in zip(logprobs_of(loaded), own_logprobs(subject), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


def test_merged_export_is_the_policy(tiny_model: Path, tied_model: Path, tmp_path: Path) -> None:
    for path in (tiny_model, tied_model):
        subject = trained(path)
        target = tmp_path / path.name
        target.mkdir()
        subject.export(target)
        merged = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        for found, wanted in zip(logprobs_of(merged), own_logprobs(subject), strict=True):
            np.testing.assert_allclose(found, wanted, atol=1e-5)
        assert transformers.AutoTokenizer.from_pretrained(target)("t5 t7")["input_ids"] == [5, 7]


def test_bfloat16_adapter_is_published_from_its_float32_masters(tiny_model: Path) -> None:
    subject = trained(tiny_model, "bfloat16")
    weights = subject.weights()
    assert all(item.dtype == torch.float32 for item in weights.values())
    assert any(not torch.equal(item, item.bfloat16().float()) for item in weights.values())
    used = {item.dtype for item in subject.policy.trainable.values()}
    assert used == {torch.bfloat16}
