"""Tiny random models, and groups to train on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers

from services.trainer.datum import Datum

VOCABULARY = 50


def save_model(path: Path, tied: bool) -> Path:
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, tie_word_embeddings=tied, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {f"t{index}": index for index in range(VOCABULARY)}
    model = tokenizers.models.WordLevel(vocabulary, unk_token="t0")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t1").save_pretrained(path)
    return path


def make_groups(
    lengths: list[list[int]], prompts: list[int], seed: int = 0, temperature: float = 1.0
) -> list[list[Datum]]:
    """Groups of datums: lengths of the completions of each group, and the length of each prompt."""
    random = np.random.default_rng(seed)
    groups = []
    for number, (completions, prompt_length) in enumerate(zip(lengths, prompts, strict=True)):
        prompt = random.integers(2, VOCABULARY, prompt_length)
        group = []
        for sibling, length in enumerate(completions):
            ids = np.concatenate([prompt, random.integers(2, VOCABULARY, length)]).astype(np.int32)
            mask = np.concatenate([np.zeros(prompt_length), np.ones(length)]).astype(np.float32)
            sampler = (random.normal(-3, 0.3, len(ids)) * mask).astype(np.float32)
            advantages = np.full(len(ids), random.normal(), np.float32)
            group.append(Datum(ids, mask, advantages, sampler, temperature, sampler, f"{number}/{sibling}"))
        groups.append(group)
    return groups
