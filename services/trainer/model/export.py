"""Writes a policy as a Hugging Face model folder, an adapter merged into its base."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from services.trainer.model.policy import ADAPTER, Policy

_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "chat_template.jinja",
)  # fmt: skip


@torch.no_grad()
def export_model(policy: Policy, masters: dict[str, Tensor], directory: Path, dtype: torch.dtype) -> None:
    """Write model.safetensors in `dtype`, config and tokenizer files into `directory`.

    The adapter is merged in float32 from its masters: W + (alpha / rank) B A.
    """
    tensors = _merged(policy, masters) if policy.peft is not None else dict(masters)
    generation = getattr(policy.model, "generation_config", None)
    write_folder(tensors, policy.model.config, generation, policy.path, directory, dtype)


def write_folder(
    tensors: dict[str, Tensor], config: Any, generation: Any, source: Path, directory: Path, dtype: torch.dtype
) -> None:
    """Write whole tensors by Hugging Face name in `dtype`, with configurations, and the tokenizer files of `source`."""
    content = {name: item.to(dtype).cpu().contiguous() for name, item in tensors.items()}
    safetensors.torch.save_file(content, directory / "model.safetensors", metadata={"format": "pt"})
    config.dtype = dtype
    config.save_pretrained(directory)
    if generation is not None:
        generation.save_pretrained(directory)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)


def _merged(policy: Policy, masters: dict[str, Tensor]) -> dict[str, Tensor]:
    merged: dict[str, Tensor] = {}
    for name, parameter in policy.model.named_parameters():
        if ".lora_" in name:
            continue
        merged[name.replace(".base_layer.", ".")] = parameter.detach()
    for name, module in policy.model.named_modules():
        if not hasattr(module, "lora_A") or ADAPTER not in getattr(module, "lora_A", {}):
            continue
        down = masters[f"base_model.model.{name}.lora_A.weight"].double()
        up = masters[f"base_model.model.{name}.lora_B.weight"].double()
        scale = module.scaling[ADAPTER]
        key = f"{name}.weight"
        merged[key] = (merged[key].double() + scale * (up @ down)).float()
    return merged
