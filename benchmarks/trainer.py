"""Training throughput of the torch backend on the CPU, against Hugging Face's Trainer on the same batches.

Run: OMP_WAIT_POLICY=PASSIVE python benchmarks/trainer.py [--threads 1]. One table, and benchmarks/results/trainer.json.
Both sides train all parameters of a randomly initialized model with cross-entropy and AdamW in float32, in this process
and in turns. `even` has sequences of one length; `mixed` has log-normal lengths, where the Trainer pads each of its
micro-batches and the backend packs. A rate counts real tokens, never padding. `grpo` is a group of siblings with one
prompt: the backend puts the prompt through the model once.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.utils.benchmark
from provenance import ROOT, commit, hardware
from rich.console import Console
from rich.table import Table
from trainer_cases import LEARNING_RATE, SIZES, Step, mixed_lengths, ours, sequences, timed
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

RESULT = ROOT / "benchmarks" / "results" / "trainer.json"
CASES = {"1m": (32, 256, 2048), "135m": (8, 256, 1024)}
"""Sequences, longest sequence and token budget of a micro-batch, for each size."""


def huggingface_trainer(path: Path, tokens: list[np.ndarray], micro_batch: int, scratch: str) -> Step:
    """One optimizer step of Hugging Face's Trainer on the batch: its own collation, loss, accumulation and clipping."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="sdpa")
    arguments = TrainingArguments(
        output_dir=scratch, use_cpu=True, per_device_train_batch_size=micro_batch, max_steps=1,
        gradient_accumulation_steps=-(-len(tokens) // micro_batch), learning_rate=LEARNING_RATE,
        optim="adamw_torch_fused", lr_scheduler_type="constant", report_to=[], save_strategy="no",
        logging_strategy="no", disable_tqdm=True,
        max_grad_norm=1.0, weight_decay=0.0, dataloader_pin_memory=False, seed=0,
    )  # fmt: skip
    records = [{"input_ids": ids.astype(np.int64).tolist()} for ids in tokens]
    trainer = Trainer(model=model, args=arguments, train_dataset=records, data_collator=padded)  # type: ignore[arg-type]

    def step() -> float:
        return float(trainer.train().training_loss)

    return step


def padded(records: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Right-padded ids, mask and labels, as transformers' language-modelling collator makes them."""
    width = max(len(item["input_ids"]) for item in records)
    ids = torch.zeros(len(records), width, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, item in enumerate(records):
        count = len(item["input_ids"])
        ids[row, :count] = labels[row, :count] = torch.tensor(item["input_ids"])
        mask[row, :count] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def batches(count: int, longest: int, vocabulary: int) -> dict[str, list[np.ndarray]]:
    """The three batches by name."""
    siblings = [longest // 2 + extra for extra in mixed_lengths(8, longest // 2)]
    group = sequences(siblings, vocabulary)
    for ids in group[1:]:
        ids[: longest // 2] = group[0][: longest // 2]
    return {
        "even": sequences([longest] * (count // 2), vocabulary),
        "mixed": sequences(mixed_lengths(count, longest), vocabulary),
        "grpo": group,
    }


def grouped(tokens: list[np.ndarray], name: str, path: Path, budget: int) -> Step:
    """Our side; the siblings of `grpo` are one group."""
    return ours(path, tokens, "float32", "cpu", budget, group_all=name == "grpo")


def measure(name: str, repeats: int, scratch: str) -> list[dict[str, Any]]:
    """One row a batch."""
    size = SIZES[name]
    count, longest, budget = CASES[name]
    path = size.make(Path(scratch), torch.float32)
    rows = []
    for kind, tokens in batches(count, longest, size.vocabulary).items():
        sides = {
            "paceline": grouped(tokens, kind, path, budget),
            "trainer": huggingface_trainer(path, tokens, max(1, budget // longest), scratch),
        }
        losses = {side: step() for side, step in sides.items()}
        seconds = {side: statistics.median(values) for side, values in timed(sides, repeats, "cpu").items()}
        lengths = [len(ids) for ids in tokens]
        rows.append({
            "model": name, "batch": kind, "sequences": len(tokens), "tokens": sum(lengths), "seconds": seconds,
            "tokens_per_second": {side: sum(lengths) / value for side, value in seconds.items()}, "losses": losses,
            "gflops": {side: size.flops(lengths) / value / 1e9 for side, value in seconds.items()},
            "ratio": seconds["trainer"] / seconds["paceline"],
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        })  # fmt: skip
    return rows


def matmul_gflops() -> float:
    """The floor's rate: the best of a float32 matrix product on these threads."""
    left = torch.randn(1024, 1024)
    best = torch.utils.benchmark.Timer("a @ a", globals={"a": left}).blocked_autorange(min_run_time=1).median
    return 2 * 1024**3 / best / 1e9


def show(result: dict[str, Any]) -> None:
    table = Table("model", "batch", "tokens", "paceline tok/s", "Trainer tok/s", "ratio", "of the matmul rate")
    for row in result["rows"]:
        rate = row["tokens_per_second"]
        table.add_row(
            row["model"], row["batch"], f"{row['tokens']:,}", f"{rate['paceline']:,.0f}", f"{rate['trainer']:,.0f}",
            f"{row['ratio']:.2f}", f"{row['gflops']['paceline'] / result['matmul_gflops']:.0%}",
        )  # fmt: skip
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    result: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/trainer.py", *sys.argv[1:]]), "commit": commit(),
        "hardware": hardware(), "threads": arguments.threads, "matmul_gflops": matmul_gflops(),
        "floor": "operations over the rate of a 1024 x 1024 float32 matrix product on the same threads",
        "goal": "ratio >= 1.5 on mixed", "rows": [],
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.sizes:
            result["rows"] += measure(name, arguments.repeats, scratch)
    show(result)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
