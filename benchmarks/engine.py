"""How fast the embedded engine generates groups, against transformers' own generate() and against the arithmetic.

Run: OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE python benchmarks/engine.py
One table, and benchmarks/results/engine.json. Both sides run in this process, in turns, with one thread and one dtype;
rates are over CPU seconds of the process, which a busy machine disturbs least, and wall time is kept beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Awaitable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from provenance import commit, hardware
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.config.services import EngineConfig
from services.engine.backends.embedded import Embedded
from services.engine.generation import Request, Sampling

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8
GOAL = "ratio >= 2 for 135m; 0.1m has next to no arithmetic and shows what calls and bookkeeping cost"


@dataclass
class Shape:
    """A model by its sizes; the weights are random, speed does not depend on them."""

    name: str
    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    prompts: int
    """Groups at once."""

    @property
    def linear(self) -> int:
        """Multiply-adds of one token in the layers."""
        size = self.hidden // self.heads
        attention = self.hidden * size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.ffn)

    @property
    def head(self) -> int:
        """Multiply-adds of the logits of one token."""
        return self.hidden * self.vocabulary


SHAPES = {
    "135m": Shape("135m", 49152, 576, 30, 9, 3, 1536, 8),
    "0.1m": Shape("0.1m", 64, 64, 2, 2, 2, 192, 8),
}


@dataclass
class Side:
    """Seconds of the best of several turns."""

    cpu: float
    wall: float


def build(shape: Shape, folder: Path) -> None:
    """Write a model folder with random weights and a tokenizer of bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=shape.vocabulary, hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads, intermediate_size=shape.ffn,
        max_position_embeddings=2048, tie_word_embeddings=True, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    vocab = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def prompts_of(shape: Shape, length: int, turn: int) -> np.ndarray:
    """int32 [prompts, length]; new ones every turn, so that no side can reuse anything."""
    return np.random.default_rng([length, turn]).integers(
        1, min(shape.vocabulary, 250), (shape.prompts, length), np.int32
    )


async def engine_turn(backend: Embedded, prompts: np.ndarray, new: int, turn: int) -> int:
    """All groups at once; the number of tokens that came."""

    async def one(index: int) -> int:
        request = Request(
            f"t{turn}.{index}", prompts[index], tuple(range(index * GROUP, (index + 1) * GROUP)),
            Sampling(max_new_tokens=new, ignore_eos=True),
        )  # fmt: skip
        count = 0
        async for pieces in backend.submit(request):
            count += sum(len(piece.token_ids) for piece in pieces)
        return count

    return sum(await asyncio.gather(*map(one, range(len(prompts)))))


def stock_turn(model: Any, prompts: np.ndarray, new: int) -> int:
    """transformers' generate with the same number of samples of each prompt."""
    ids = torch.from_numpy(prompts.astype(np.int64))
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, temperature=1.0, pad_token_id=0,
            num_return_sequences=GROUP, max_new_tokens=new, min_new_tokens=new,
        )  # fmt: skip
    return int((out.shape[1] - ids.shape[1]) * out.shape[0])


async def timed(work: Awaitable[int], tokens: int) -> Side:
    """How long some generation took; it must give `tokens` tokens."""
    cpu, wall = time.process_time(), time.monotonic()
    found = await work
    if found != tokens:
        raise SystemExit(f"{found} tokens came, {tokens} were asked for")
    return Side(time.process_time() - cpu, time.monotonic() - wall)


def best(sides: list[Side]) -> Side:
    """The least of each kind of time."""
    return Side(min(item.cpu for item in sides), min(item.wall for item in sides))


def gemm_rate(shape: Shape, dtype: torch.dtype) -> float:
    """Multiply-adds a second of one big matrix product in this dtype: the best of a few."""
    left = torch.randn(512, shape.hidden).to(dtype)
    right = torch.randn(max(1024, shape.ffn), shape.hidden).to(dtype)
    rates = []
    for _ in range(12):
        began = time.process_time()
        for _ in range(4):
            F.linear(left, right)
        rates.append(4 * left.shape[0] * left.shape[1] * right.shape[0] / (time.process_time() - began))
    return max(rates)


def floor_seconds(shape: Shape, length: int, new: int, rate: float) -> float:
    """The products that cannot be avoided: each prompt once, each sampled token's logits, each fed-back token."""
    rows = shape.prompts * GROUP
    work = shape.prompts * length * shape.linear + rows * (new - 1) * shape.linear + rows * new * shape.head
    return work / rate


async def measure(shape: Shape, dtype: str, turns: int, folder: Path) -> list[dict[str, Any]]:
    """Rows of the table for one model and dtype."""
    config = EngineConfig(dtype=dtype, max_sequences=shape.prompts * GROUP, max_sequence_length=512)  # type: ignore[arg-type]
    backend = Embedded(Embedded.Options(), config, str(folder))
    await backend.load()
    backend.serve_base_weights()
    stock: Any = LlamaForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    rate = gemm_rate(shape, getattr(torch, dtype))
    for warm in (32, 256):
        await engine_turn(backend, prompts_of(shape, warm, 99), 2, 99)
        stock_turn(stock, prompts_of(shape, warm, 99)[:1], 2)
    rows = []
    for length, new in ((32, 16), (32, 32), (256, 16), (256, 32)):
        tokens = shape.prompts * GROUP * new

        engine_sides, stock_sides = [], []
        for turn in range(turns):
            prompts = prompts_of(shape, length, turn)
            engine_sides.append(await timed(engine_turn(backend, prompts, new, turn), tokens))
            stock_sides.append(await timed(asyncio.to_thread(stock_turn, stock, prompts, new), tokens))
        ours, theirs = best(engine_sides), best(stock_sides)
        floor = floor_seconds(shape, length, new, rate)
        rows.append({
            "model": shape.name, "dtype": dtype, "prompts": shape.prompts, "group": GROUP, "prompt_tokens": length,
            "new_tokens": new, "engine": asdict(ours), "transformers": asdict(theirs),
            "engine_tokens_per_cpu_second": tokens / ours.cpu,
            "transformers_tokens_per_cpu_second": tokens / theirs.cpu,
            "ratio": theirs.cpu / ours.cpu, "ratio_wall": theirs.wall / ours.wall,
            "gemm_gflops": 2 * rate / 1e9, "floor_seconds": floor, "over_floor": ours.cpu / floor,
        })  # fmt: skip
        print_row(rows[-1])
    await backend.close()
    return rows


def print_row(row: dict[str, Any]) -> None:
    print(
        f"{row['model']:>5} {row['dtype']:>8} {row['prompt_tokens']:>6} {row['new_tokens']:>4} "
        f"{row['engine_tokens_per_cpu_second']:>9.0f} {row['transformers_tokens_per_cpu_second']:>13.0f} "
        f"{row['ratio']:>6.2f} {row['ratio_wall']:>6.2f} {row['over_floor']:>6.2f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--dtypes", nargs="*", default=["float32", "bfloat16"], choices=["float32", "bfloat16"])
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks/results/engine.json")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    print("model    dtype prompt  new  engine/s  transformers/s  ratio   wall  x floor   (tokens per CPU second)")
    rows: list[dict[str, Any]] = []
    for name in arguments.models:
        with tempfile.TemporaryDirectory() as folder:
            build(SHAPES[name], Path(folder))
            for dtype in arguments.dtypes:
                rows += asyncio.run(measure(SHAPES[name], dtype, arguments.turns, Path(folder)))
    smallest = {name: min(row["ratio"] for row in rows if row["model"] == name) for name in arguments.models}
    print(f"smallest ratio: {', '.join(f'{name} {ratio:.2f}' for name, ratio in smallest.items())}")
    result = {
        "command": " ".join(["python", *sys.argv]), "commit": commit(),
        "hardware": hardware() | {
            "threads": torch.get_num_threads(), "torch": torch.__version__, "transformers": transformers.__version__,
        },
        "goal": GOAL, "smallest_ratio": smallest, "rows": rows,
    }  # fmt: skip
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
