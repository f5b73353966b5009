"""Training throughput of the torch backend on one GPU, against the same model in plain transformers.

Run: python benchmarks/gpu/trainer.py [--sizes 0.5b 1.5b] [--out DIR] [--profile]. Writes gpu_trainer.json.

Two batches for each size, in bfloat16: `even`, sequences of 4,096 tokens, for model FLOPs utilization; and `mixed`,
log-normal lengths up to 4,096, where plain transformers pads and the backend packs. Both sides train all parameters
with fused AdamW: plain transformers on bfloat16 parameters, the backend on float32 masters. `compiled`: each layer
through torch.compile (the backend's trainer.compile).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.profiler
from provenance import ROOT, commit
from trainer_cases import PEAK, SIZES, Size, mixed_lengths, ours, plain, sequences, synchronize, timed
from transformers import AutoModelForCausalLM

from services.trainer.model.layers import compile_layers

SIDES = ("paceline", "paceline, compiled", "transformers", "transformers, compiled")


def measure(size: Size, path: Path, lengths: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Both sides of one batch, one after the other, each alone in the memory."""
    tokens = sequences(lengths, size.vocabulary)
    sides: dict[str, Any] = {}
    for name in SIDES:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        if name.startswith("paceline"):
            step = ours(path, tokens, "bfloat16", "cuda", arguments.budget, compile=name.endswith("compiled"))
        else:
            model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, attn_implementation="sdpa")
            model.cuda()
            if name.endswith("compiled"):
                compile_layers(model)
            step = plain(model, tokens, "cuda", arguments.micro_batch)
        try:
            loss = step()
            if arguments.profile and name == arguments.profile:
                profile(step)
            seconds = statistics.median(timed({name: step}, arguments.repeats, "cuda")[name])
        except torch.cuda.OutOfMemoryError as error:
            sides[name] = {"failed": str(error)[:300]}
            continue
        finally:
            step = model = None  # type: ignore[assignment]
            gc.collect()
        flops = size.flops(lengths)
        peak = PEAK.get(torch.cuda.get_device_name(0), 0.0)
        sides[name] = {
            "seconds": seconds, "tokens_per_second": sum(lengths) / seconds, "loss": loss,
            "tflops": flops / seconds / 1e12, "mfu": flops / seconds / peak if peak else None,
            "seconds_over_floor": seconds * peak / flops if peak else None,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }  # fmt: skip
        print(size.name, name, json.dumps(sides[name]), flush=True)
    base = sides["transformers"].get("seconds")
    ratios = {name: base / side["seconds"] for name, side in sides.items() if base and "seconds" in side}
    return {
        "speed_over_transformers": ratios,
        "sequences": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        **sides,
    }


def profile(step: Any) -> None:
    """Print where one step's time goes on the device."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as taken:
        step()
        synchronize("cuda")
    report: Any = taken
    print(report.key_averages().table(sort_by="self_cuda_time_total", row_limit=28, max_name_column_width=70))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["0.5b", "1.5b"], choices=sorted(SIZES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--mixed", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of one of our micro-batches")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences of one of transformers' batches")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--profile", default="", choices=["", *SIDES], help="print where a step of this side goes")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/gpu/trainer.py", "commit": commit(), "hardware": torch.cuda.get_device_name(0),
        "torch": torch.__version__, "floor": "operations over 989.4 TFLOP/s; the lowest possible time of a step",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.sizes:
            size = SIZES[name]
            path = size.make(Path(scratch), torch.bfloat16)
            even = [arguments.longest] * arguments.sequences
            mixed = mixed_lengths(arguments.mixed, arguments.longest)
            result[name] = {
                "even": measure(size, path, even, arguments), "mixed": measure(size, path, mixed, arguments),
            }  # fmt: skip
    (arguments.out / "gpu_trainer.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
