"""Time TRL's GRPOTrainer on the quickstart's model, prompts and lengths; prints JSON.

`benchmarks/loop.py` starts this in an environment of its own; see there for the comparison.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """Wall time of each optimizer step, generation included."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = time.perf_counter()
        self.seconds.append(now - self._last)
        self._last = now


def exact(completions: list[str], label: list[str], **_: Any) -> list[float]:
    """1 where the stripped completion is the label."""
    return [float(text.strip() == wanted) for text, wanted in zip(completions, label, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--groups", type=int, default=16)
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=0, help="samples a forward pass; 0 is the whole batch")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    # The newline ends an answer here, as the run file's stop string does.
    newline = tokenizer.encode("\n")[-1]
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.bfloat16)
    model.generation_config.eos_token_id = newline
    tokenizer.eos_token_id = newline
    batch = arguments.groups * arguments.siblings
    micro = arguments.micro_batch or batch
    config = GRPOConfig(
        output_dir="/tmp/paceline-trl", use_cpu=True, bf16=False, max_steps=arguments.steps,
        per_device_train_batch_size=micro, gradient_accumulation_steps=batch // micro,
        num_generations=arguments.siblings, max_completion_length=arguments.new_tokens, temperature=1.0, beta=0.0,
        learning_rate=3e-4, lr_scheduler_type="constant", warmup_steps=4, report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True, gradient_checkpointing=False, seed=0,
    )  # fmt: skip
    records = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    clock = StepClock()
    trainer = GRPOTrainer(
        model=model, reward_funcs=exact, args=config, train_dataset=Dataset.from_list(records),
        processing_class=tokenizer, callbacks=[clock],
        peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"),
    )  # fmt: skip
    trainer.train()
    json.dump({"seconds": clock.seconds}, sys.stdout)


if __name__ == "__main__":
    main()
