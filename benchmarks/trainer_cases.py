"""What the trainer benchmarks share: models by size, batches, our side, and plain transformers on the same batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from paceline.config import PluginTable
from paceline.config.trainer import TrainerConfig
from services.trainer.backends.torch import TorchBackend
from services.trainer.datum import Datum
from services.trainer.objective import Objective

PEAK = {"NVIDIA H200": 989.4e12}
"""Dense bfloat16 operations a second by the data sheet, 989.4 TFLOP/s: the rate of the floor."""
SEED = 0
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Size:
    """A model by its sizes; the weights are random, speed does not depend on them."""

    name: str
    family: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    tied: bool = True

    def make(self, directory: Path, dtype: torch.dtype) -> Path:
        """Write a Hugging Face folder with random weights and return it."""
        config_class, model_class = {
            "llama": (LlamaConfig, LlamaForCausalLM), "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        }[self.family]  # fmt: skip
        torch.manual_seed(SEED)
        config = config_class(
            vocab_size=self.vocabulary, hidden_size=self.hidden, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, intermediate_size=self.ffn,
            tie_word_embeddings=self.tied, max_position_embeddings=8192,
        )  # fmt: skip
        path = directory / self.name
        model_class(config).to(dtype).save_pretrained(path)
        return path

    @property
    def matrix_parameters(self) -> int:
        """Parameters that every token is multiplied with: the layers' matrices and the head."""
        size = self.hidden // self.heads
        attention = self.hidden * size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn) + self.vocabulary * self.hidden

    def flops(self, lengths: Sequence[int]) -> float:
        """Operations of forward and backward: 6 a matrix parameter and token, and causal attention (half of T^2).

        Source: PaLM, arXiv:2204.02311, appendix B; recomputation of any kind is not counted.
        """
        tokens = float(sum(lengths))
        squares = float(sum(length * length for length in lengths))
        return 6.0 * self.matrix_parameters * tokens + 6.0 * self.layers * self.hidden * squares


SIZES = {
    "1m": Size("1m", "llama", 512, 128, 4, 4, 2, 384),
    "135m": Size("135m", "llama", 49152, 576, 30, 9, 3, 1536),
    "0.5b": Size("0.5b", "qwen2", 151936, 896, 24, 14, 2, 4864),
    "1.5b": Size("1.5b", "qwen2", 151936, 1536, 28, 12, 2, 8960),
}


def mixed_lengths(count: int, longest: int) -> list[int]:
    """Log-normal lengths, as completions have: median near a quarter of the longest, cut at the longest."""
    drawn = np.random.default_rng(SEED).lognormal(np.log(longest / 4), 0.8, count)
    return [int(item) for item in np.clip(drawn, longest // 32, longest)]


def sequences(lengths: Sequence[int], vocabulary: int) -> list[np.ndarray]:
    """Random token ids, int32 [length] each."""
    random = np.random.default_rng(SEED + 1)
    return [random.integers(0, vocabulary, length).astype(np.int32) for length in lengths]


def data_of(tokens: Sequence[np.ndarray], group_all: bool) -> list[list[Datum]]:
    """A group a sequence, or one group; every token but the first is trained on."""
    data = []
    for number, ids in enumerate(tokens):
        weights = np.ones(len(ids), np.float32)
        weights[0] = 0
        zeros = np.zeros(len(ids), np.float32)
        data.append(Datum(ids, weights, weights.copy(), zeros, name=f"sequence {number}"))
    return [data] if group_all else [[datum] for datum in data]


Step = Callable[[], float]


def ours(
    path: Path, tokens: Sequence[np.ndarray], dtype: str, device: str, budget: int, group_all: bool = False, **more: Any
) -> Step:
    """A step of the torch backend with the cross-entropy loss; returns the mean token loss."""
    config = TrainerConfig.model_validate({
        "loss": PluginTable(name="cross_entropy"), "dtype": dtype, "device": device, "tokens_per_micro_batch": budget,
        "threads": torch.get_num_threads(), **more,
    })  # fmt: skip
    backend = TorchBackend(path, config, SEED)
    objective = Objective.from_config(config)
    groups = data_of(tokens, group_all)
    count = float(sum(len(ids) - 1 for ids in tokens))

    def step() -> float:
        outcome = backend.forward_backward(groups, objective)
        backend.optim_step(count, LEARNING_RATE)
        return outcome.loss_sum / count

    return step


def plain(model: Any, tokens: Sequence[np.ndarray], device: str, micro_batch: int) -> Step:
    """A step as one writes it with transformers: batches in the order of the data, padded to the longest of each."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    count = float(sum(len(ids) - 1 for ids in tokens))

    def step() -> float:
        total = 0.0
        for start in range(0, len(tokens), micro_batch):
            part = tokens[start : start + micro_batch]
            width = max(len(ids) for ids in part)
            ids = torch.zeros(len(part), width, dtype=torch.long)
            labels = torch.full((len(part), width), -100)
            mask = torch.zeros(len(part), width, dtype=torch.long)
            for row, item in enumerate(part):
                ids[row, : len(item)] = labels[row, : len(item)] = torch.from_numpy(item.astype(np.int64))
                mask[row, : len(item)] = 1
            even = bool(mask.all())
            loss = model(
                ids.to(device), attention_mask=None if even else mask.to(device), labels=labels.to(device),
                use_cache=False, num_items_in_batch=torch.tensor(count, device=device),
            ).loss  # fmt: skip
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    return step


def timed(steps: dict[str, Step], repeats: int, device: str) -> dict[str, list[float]]:
    """Seconds of each side's steps, in turns, after one that is not counted."""
    found: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(repeats + 1):
        for name, step in steps.items():
            synchronize(device)
            began = time.perf_counter()
            step()
            synchronize(device)
            if turn:
                found[name].append(time.perf_counter() - began)
    return found


def synchronize(device: str) -> None:
    """Wait for the device's work."""
    if device == "cuda":
        torch.cuda.synchronize()
