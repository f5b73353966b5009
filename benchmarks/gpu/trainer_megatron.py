"""Backend megatron on one GPU: does it compute what backend torch and transformers compute, and how fast.

Run: python benchmarks/gpu/trainer_megatron.py [--sizes 135m 0.5b] [--out DIR] [--skip-speed]. Writes
gpu_trainer_megatron.json. Needs the extra `megatron`; several GPUs are in two_gpus.py.

Smoke: tiny models of all families in float32 (TF32 off), log-probabilities against transformers, three training steps
against backend torch; the attention kernel in bfloat16 against a call for each sequence, over context ranks too. Speed:
random weights in bfloat16, all parameters, `even` and `mixed` batches as in trainer.py, the same for both backends.
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
sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tests" / "numerics"))

import numpy as np
import parity  # type: ignore[import-not-found]
import torch
import transformers
from provenance import ROOT, commit
from trainer_cases import LEARNING_RATE, PEAK, SEED, SIZES, Size, Step, data_of, mixed_lengths, sequences, timed

from paceline.config.trainer import TrainerConfig
from paceline.plugins import registry
from services.trainer.objective import Objective


def smoke(scratch: Path, device: str) -> dict[str, Any]:
    """Largest differences of each family, relative to the larger of 1 and the value."""
    found: dict[str, Any] = {}
    for family in registry("model_family").available():
        torch.manual_seed(7)
        path = scratch / family
        model = transformers.AutoModelForCausalLM.from_config(registry("model_family").load(family).tiny())
        model.save_pretrained(path)
        layout = parity.Layout(family, str(path), "megatron", {}, {"device": device})
        backend = registry("train_backend").load("megatron")(path, layout.config(), 0)
        weights = backend.weights()
        exact = all(torch.equal(weights[name], item) for name, item in model.named_parameters())
        gaps: dict[str, float] = {"weights_exact": exact}
        gaps["transformers"] = against_transformers(backend, model.to(device))
        gaps.update(parity.difference(parity.reference(layout), parity._train(backend, layout)))
        kept = ("weights_exact", "transformers", "loss", "grad_norm", "weights", "logprobs")
        found[family] = {name: gaps[name] for name in kept}
        print(family, json.dumps(found[family]), flush=True)
    return found


@torch.no_grad()
def against_transformers(backend: Any, model: Any) -> float:
    """Largest difference of a log-probability from transformers' for the same sequence alone."""
    worst = 0.0
    groups = parity.groups_of_a11(backend.vocabulary)
    for group, found in zip(groups, backend.forward(groups), strict=True):
        for datum, logprobs in zip(group, found, strict=True):
            ids = torch.from_numpy(datum.token_ids).long().unsqueeze(0).to(model.device)
            plain = (model(ids).logits[0, :-1].float() / datum.temperature).log_softmax(-1)
            chosen = plain.gather(1, ids[0, 1:, None])[:, 0].cpu()
            worst = max(worst, float((chosen - torch.from_numpy(logprobs[1:])).abs().max()))
    return worst


def kernel(device: str) -> dict[str, float]:
    """Attention by the kernel against a call for each segment: outputs and gradients, relative to the largest value."""
    from services.trainer.megatron import attention
    from services.trainer.megatron.stream import segments_of

    bounds = np.cumsum([0, 512, 1, 130, 1405])
    total = int(bounds[-1])
    found: dict[str, float] = {}
    for rank, ranks in ((0, 1), (0, 2), (1, 2)):
        segments = segments_of(bounds, rank, ranks)
        torch.manual_seed(1)
        shapes = ((total // ranks, 8, 64), (total, 2, 64), (total, 2, 64))
        query, key, value = parts = [
            torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True) for shape in shapes
        ]
        plan = attention.KernelPlan(segments, torch.device(device))
        outputs = [
            attention._by_kernel(query, key, value, plan, None),
            attention._one_by_one(query, key, value, segments, None),
        ]
        pull = torch.randn_like(outputs[0])
        gradients = [torch.autograd.grad(item, parts, pull) for item in outputs]
        pairs = [(outputs[0], outputs[1]), *zip(*gradients, strict=True)]
        found[f"rank {rank} of {ranks}"] = max(
            float((one.float() - other.float()).abs().max() / other.float().abs().max()) for one, other in pairs
        )
    print("attention", json.dumps(found), flush=True)
    return found


def stepper(backend: str, path: Path, tokens: list[np.ndarray], device: str, budget: int, compiled: bool) -> Step:
    """A step of a backend with the cross-entropy loss; returns the mean token loss."""
    config = TrainerConfig.model_validate({
        "backend": backend, "loss": {"name": "cross_entropy"}, "dtype": "bfloat16", "device": device,
        "tokens_per_micro_batch": budget, **({"compile": True} if compiled else {}),
    })  # fmt: skip
    subject = registry("train_backend").load(backend)(path, config, SEED)
    objective, groups = Objective.from_config(config), data_of(tokens, False)
    count = float(sum(len(ids) - 1 for ids in tokens))

    def step() -> float:
        outcome = subject.forward_backward(groups, objective)
        subject.optim_step(count, LEARNING_RATE)
        return outcome.loss_sum / count

    return step


def speed(size: Size, path: Path, lengths: list[int], arguments: argparse.Namespace) -> dict[str, Any]:
    """Both backends, one after the other, each alone in the memory."""
    tokens = sequences(lengths, size.vocabulary)
    sides: dict[str, Any] = {"sequences": len(lengths), "tokens": sum(lengths), "longest": max(lengths)}
    peak = PEAK.get(torch.cuda.get_device_name(0), 0.0)
    for name, compiled in (("megatron", False), ("torch", False), ("torch compiled", True)):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        step: Step | None = None
        try:
            step = stepper(name.split()[0], path, tokens, arguments.device, arguments.budget, compiled)
            loss = step()
            seconds = statistics.median(timed({name: step}, arguments.repeats, "cuda")[name])
        except torch.cuda.OutOfMemoryError as error:
            sides[name] = {"failed": str(error)[:300]}
            continue
        finally:
            step = None
        sides[name] = {
            "seconds": seconds, "tokens_per_second": sum(lengths) / seconds, "loss": loss,
            "mfu": size.flops(lengths) / seconds / peak if peak else None,
            "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        }  # fmt: skip
        print(size.name, name, json.dumps(sides[name]), flush=True)
    return sides


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=["135m", "0.5b"], choices=sorted(SIZES))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--sequences", type=int, default=16)
    parser.add_argument("--mixed", type=int, default=64)
    parser.add_argument("--longest", type=int, default=4096)
    parser.add_argument("--budget", type=int, default=16384, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--skip-speed", action="store_true")
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    host = arguments.device == "cpu"
    result: dict[str, Any] = {
        "command": "python benchmarks/gpu/trainer_megatron.py", "commit": commit(), "torch": torch.__version__,
        "hardware": "host" if host else torch.cuda.get_device_name(0),
    }  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        result["smoke"] = smoke(Path(scratch), arguments.device)
        if not host:
            result["attention"] = kernel(arguments.device)
        for name in () if arguments.skip_speed or host else arguments.sizes:
            path = SIZES[name].make(Path(scratch), torch.bfloat16)
            even = [arguments.longest] * arguments.sequences
            mixed = mixed_lengths(arguments.mixed, arguments.longest)
            result[name] = {
                "even": speed(SIZES[name], path, even, arguments), "mixed": speed(SIZES[name], path, mixed, arguments),
            }  # fmt: skip
    (arguments.out / "gpu_trainer_megatron.json").write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
