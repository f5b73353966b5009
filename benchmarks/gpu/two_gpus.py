"""The trainer on two GPUs of one host over NCCL: does it compute what one GPU computes, and how fast.

Run: python benchmarks/gpu/two_gpus.py [--out DIR] [--skip-parity | --skip-speed]. Writes gpu_two.json.

Parity: the eight sequences of tests/numerics/parity.py for three steps, in float32 (TF32 off) and bfloat16, each layout
against backend torch on one GPU; the largest difference of any logged value, of log-probabilities and of weights,
relative to the larger of 1 and the value. Speed: a randomly initialized model of 1.5 billion parameters in bfloat16 on
sequences of 4,096 tokens, the same batch for every layout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "numerics"))

import parity  # type: ignore[import-not-found]
import torch
import transformers
from parity import Layout  # type: ignore[import-not-found]
from provenance import ROOT, commit
from trainer_cases import PEAK, SEED, SIZES, data_of, sequences

from paceline.config.trainer import TrainerConfig
from paceline.plugins import registry
from services.trainer.objective import Objective
from services.trainer.ranks.world import World

PAIR = {"ranks": 2}
LAYOUTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "fsdp 1x2": ("qwen3", "fsdp", PAIR),
    "fsdp 2x1": ("qwen3", "fsdp", {**PAIR, "replicate": 2, "shard": 1}),
    "megatron tp2": ("qwen3", "megatron", {**PAIR, "tensor": 2}),
    "megatron tp2 sp": ("qwen3", "megatron", {**PAIR, "tensor": 2, "sequence_parallel": True}),
    "megatron pp2": ("qwen3", "megatron", {**PAIR, "pipeline": 2}),
    "megatron dp2": ("qwen3", "megatron", PAIR),
    "megatron cp2": ("qwen3", "megatron", {**PAIR, "context": 2}),
    "megatron ep2": ("qwen3_moe", "megatron", {**PAIR, "expert": 2}),
}
"""Model family, backend and [trainer.parallel] of each. The distributed optimizer is on wherever data is parallel."""
SPEED: dict[str, tuple[str, int, dict[str, Any]]] = {
    "torch, one GPU": ("torch", 1, {}),
    "torch compiled, one GPU": ("torch", 1, {"compile": True}),
    "megatron, one GPU": ("megatron", 1, {"parallel": {"ranks": 1}}),
    "fsdp 1x2": ("fsdp", 2, {"parallel": PAIR}),
    "fsdp 1x2 compiled": ("fsdp", 2, {"parallel": PAIR, "compile": True}),
    "fsdp 2x1": ("fsdp", 2, {"parallel": {**PAIR, "replicate": 2, "shard": 1}}),
    "megatron tp2 sp": ("megatron", 2, {"parallel": {**PAIR, "tensor": 2, "sequence_parallel": True}}),
    "megatron dp2": ("megatron", 2, {"parallel": PAIR}),
}


def agree(scratch: Path) -> dict[str, Any]:
    """The matrix in both types."""
    models = {}
    for family in ("qwen3", "qwen3_moe"):
        torch.manual_seed(7)
        config = registry("model_family").load(family).tiny()
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(scratch / family)
        models[family] = str(scratch / family)
    found: dict[str, Any] = {}
    for dtype in ("float32", "bfloat16"):
        fields = {"device": "cuda", "dtype": dtype}
        layouts = [
            Layout(name, models[family], backend, parallel, fields)
            for name, (family, backend, parallel) in LAYOUTS.items()
        ]
        known = {family: parity.reference(Layout("", path, "torch", {}, fields)) for family, path in models.items()}
        for layout, (family, _, _) in zip(layouts, LAYOUTS.values(), strict=True):
            try:
                record = parity.launch(scratch / dtype / layout.name, 2, [layout], device="cuda")[layout.name]
            except AssertionError as error:
                found[f"{layout.name} {dtype}"] = {"failed": str(error)[-1500:]}
                print(layout.name, dtype, "failed", str(error)[-1500:], flush=True)
                continue
            gaps = parity.difference(known[family], record)
            parts = {key: gaps.pop(key) for key in ("weights", "logprobs", "loss", "grad_norm")}
            found[f"{layout.name} {dtype}"] = {**parts, "other values": max(gaps.values())}
            print(layout.name, dtype, json.dumps(found[f"{layout.name} {dtype}"]), flush=True)
    return found


def speed(path: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Each layout in processes of its own."""
    found = {}
    for name, (_, ranks, _) in SPEED.items():
        folder = path.parent / name.replace(" ", "-").replace(",", "")
        folder.mkdir()
        command = [sys.executable, __file__, "--rank-of", name, "--folder", str(folder), "--model", str(path)]
        command += ["--sequences", str(arguments.sequences), "--longest", str(arguments.longest)]
        logs = [(folder / f"{rank}.log").open("wb") for rank in range(ranks)]
        processes = [
            subprocess.Popen([*command, "--rank", str(rank)], stdout=log, stderr=log) for rank, log in enumerate(logs)
        ]
        codes = []
        try:
            codes = [process.wait(arguments.limit) for process in processes]
        except subprocess.TimeoutExpired:
            codes = ["timeout"]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        if codes != [0] * ranks:
            found[name] = {"failed": "\n".join((folder / f"{rank}.log").read_text()[-1200:] for rank in range(ranks))}
        else:
            found[name] = json.loads((folder / "result.json").read_text())
        print(name, json.dumps(found[name]), flush=True)
    return found


def rank_of(arguments: argparse.Namespace) -> None:
    """Time the steps of one rank; rank 0 writes what it found."""
    backend_name, ranks, fields = SPEED[arguments.rank_of]
    size = SIZES["1.5b"]
    config = TrainerConfig.model_validate({
        "backend": backend_name, "device": "cuda", "dtype": "bfloat16", "loss": {"name": "cross_entropy"},
        "tokens_per_micro_batch": arguments.budget, **fields,
    })  # fmt: skip
    world = World.single("cuda")
    if ranks > 1 or backend_name == "megatron":
        store = torch.distributed.FileStore(str(Path(arguments.folder) / "store"), ranks)  # type: ignore[attr-defined]
        world = World.join(arguments.rank, ranks, arguments.rank, "cuda", store)
    backend = registry("train_backend").load(backend_name)(Path(arguments.model), config, SEED, world)
    lengths = [arguments.longest] * arguments.sequences
    groups = data_of(sequences(lengths, size.vocabulary), False)
    objective, count = Objective.from_config(config), float(sum(lengths) - len(lengths))
    seconds, losses = [], []
    for _ in range(arguments.repeats + 1):
        torch.cuda.synchronize()
        world.barrier()
        began = time.perf_counter()
        losses.append(backend.forward_backward(groups, objective).loss_sum / count)
        backend.optim_step(count, 1e-5)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if arguments.rank == 0:
        step = statistics.median(seconds[1:])
        result = {
            "seconds": step, "tokens_per_second": sum(lengths) / step, "losses": losses,
            "mfu": size.flops(lengths) / step / PEAK["NVIDIA H200"] / ranks,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }  # fmt: skip
        (Path(arguments.folder) / "result.json").write_text(json.dumps(result))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--skip-parity", action="store_true")
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--limit", type=float, default=150.0, help="seconds of one layout's speed")
    for name in ("--rank-of", "--folder", "--model"):
        parser.add_argument(name, default="", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank_of:
        rank_of(arguments)
        return
    result: dict[str, Any] = {
        "command": "python benchmarks/gpu/two_gpus.py", "commit": commit(), "torch": torch.__version__,
        "hardware": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}",
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        if not arguments.skip_parity:
            result["parity"] = agree(Path(scratch))
        if not arguments.skip_speed:
            path = SIZES["1.5b"].make(Path(scratch), torch.bfloat16)
            result["speed"] = speed(path, arguments)
    (arguments.out / "gpu_two.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    code = 1
    try:
        main()
        code = 0
    except Exception:  # noqa: BLE001  other ranks wait: end at once, with the reason in the log
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
