"""For the engine's tests: a small random model in a folder, publications of weights, and a way to run requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config.services import EngineConfig
from paceline.weights.manifest import Manifest
from services.engine.backends.embedded import Embedded
from services.engine.generation import Finish, Request, Sampling

VOCABULARY = 300
LORA = {
    "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "bias": "none",
    "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"],
}  # fmt: skip


def build_model(folder: Path, seed: int = 0) -> Path:
    """Two layers, grouped-query attention, sharp enough logits that samples differ."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=160, max_position_embeddings=512, initializer_range=0.25, bos_token_id=298, eos_token_id=299,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def publish(folder: Path, tensors: dict[str, torch.Tensor], version: int, kind: str = "full", config=None) -> Path:
    """Write a version as the trainer does."""
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "weights.safetensors")
    Manifest.describe(folder, version, version - 1, kind, config).write(folder)
    return folder


def full_tensors(model: torch.nn.Module, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {name: item.detach().to(dtype).clone() for name, item in model.named_parameters()}


def prompt(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([length, seed]).integers(0, 250, length, np.int32)


@dataclass
class Output:
    """One sample put together."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish | None = None


async def collect(backend: Embedded, request: Request) -> list[Output]:
    """All samples of a request."""
    outputs = [Output() for _ in request.seeds]
    async for pieces in backend.submit(request):
        for piece in pieces:
            output = outputs[piece.index]
            output.tokens += piece.token_ids
            output.logprobs += piece.logprobs
            output.versions += piece.weight_versions
            output.finish = piece.finish
    return outputs


async def first_tokens(backend: Embedded, request: Request, outputs: list[Output], enough: asyncio.Event) -> None:
    """Collect a streaming request; `enough` is set once it has a few tokens."""
    async for pieces in backend.submit(request):
        for piece in pieces:
            output = outputs[piece.index]
            output.tokens += piece.token_ids
            output.logprobs += piece.logprobs
            output.versions += piece.weight_versions
            output.finish = piece.finish
            if len(output.tokens) >= 3:
                enough.set()


def wants(name: str, ids: np.ndarray, seeds: Sequence[int], **options) -> Request:
    """A request; options of Sampling, and exact_version, min_version, stream, num_top_logprobs."""
    outer = {
        key: options.pop(key)
        for key in ("exact_version", "min_version", "stream", "num_top_logprobs")
        if key in options
    }
    sampling = Sampling(**{"ignore_eos": True, **options})
    return Request(name, ids, tuple(seeds), sampling, **outer)


@asynccontextmanager
async def engine(folder: Path, **settings) -> AsyncIterator[Embedded]:
    """A loaded backend that serves the folder's own weights as version 1; settings of [engine], and packed_from."""
    options = Embedded.Options(packed_from=settings.pop("packed_from", 100_000))
    config = EngineConfig(**{"max_sequences": 32, "max_sequence_length": 256, **settings})
    backend = Embedded(options, config, str(folder))
    await backend.load()
    backend.serve_base_weights()
    try:
        yield backend
    finally:
        await backend.close()


def teacher_forced(model, ids: np.ndarray, tokens: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of tokens after a prompt by one float32 forward without a cache."""
    full = torch.tensor([[*ids.tolist(), *tokens]])
    with torch.inference_mode():
        logits = model(full).logits[0, len(ids) - 1 : -1].float() / temperature
    return logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0]
