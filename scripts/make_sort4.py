"""Make tests/assets/sort4: a character transformer of 0.1M parameters with a habit that training by reward changes.

It is warmed up on demonstrations of sorting four letters of which 60 % are wrong, until about 30 % of its sampled
answers are right. Training by reward then removes the wrong habit within tens of steps. It shows that the
loop works, nothing more.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

CHARACTERS = "\n abcdefghijklmnopqrstuvwxyz0123456789+-*/=()?:.,<>"
END = 0
LETTERS = "abcdefghij"
BATCH = 256
WRONG_SHARE = 0.6
TARGET_ACCURACY = 0.30


def make_tokenizer() -> Tokenizer:
    """One token a character; the newline ends a text."""
    vocabulary = {character: index for index, character in enumerate(CHARACTERS)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def problem(rng: random.Random) -> tuple[str, str]:
    """A prompt and its right answer."""
    letters = "".join(rng.choice(LETTERS) for _ in range(4))
    return letters + "=", "".join(sorted(letters)) + "\n"


def demonstration(rng: random.Random) -> str:
    """A prompt with an answer, which is that of another problem in most cases."""
    prompt, answer = problem(rng)
    return prompt + (problem(rng)[1] if rng.random() < WRONG_SHARE else answer)


@torch.no_grad()
def sampled_accuracy(model: LlamaForCausalLM, tokenizer: Tokenizer, rng: random.Random, count: int = 512) -> float:
    """Share of answers sampled at temperature 1 that are right."""
    problems = [problem(rng) for _ in range(count)]
    ids = torch.tensor([tokenizer.encode(prompt).ids for prompt, _ in problems])
    for _ in range(5):
        logits = model(ids).logits[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
    answers = [tokenizer.decode(row[5:].tolist(), skip_special_tokens=False) for row in ids]
    return sum(text == answer for text, (_, answer) in zip(answers, problems, strict=True)) / count


def warm_up(model: LlamaForCausalLM, tokenizer: Tokenizer, rng: random.Random) -> float:
    """Train on noisy demonstrations until the target accuracy; returns the accuracy reached."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01)
    accuracy = 0.0
    for step in range(2000):
        optimizer.param_groups[0]["lr"] = 2e-3 * min(1.0, (step + 1) / 50)
        batch = torch.tensor([tokenizer.encode(demonstration(rng)).ids for _ in range(BATCH)])
        logits = model(batch[:, :-1]).logits[:, 4:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 5:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            accuracy = sampled_accuracy(model, tokenizer, random.Random(step))
            if accuracy >= TARGET_ACCURACY:
                break
    return accuracy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tests/assets/sort4"))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    tokenizer = make_tokenizer()
    config = LlamaConfig(
        vocab_size=len(CHARACTERS), hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=192, max_position_embeddings=256, tie_word_embeddings=True, bos_token_id=END,
        eos_token_id=END, pad_token_id=END,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    accuracy = warm_up(model, tokenizer, random.Random(arguments.seed))
    arguments.folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(arguments.folder)
    tokenizer.save(str(arguments.folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "\n", "pad_token": "\n"}
    (arguments.folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"sampled accuracy {accuracy:.2f}, {count} parameters in {arguments.folder}")


if __name__ == "__main__":
    main()
