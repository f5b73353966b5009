"""What the layouts of one launch find out on every rank besides training: facts as JSON, compared by the tests."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import torch
from parity import PROBES, case_a11

from services.trainer.datum import Datum
from services.trainer.objective import Objective

LOSS = Objective.from_spec({"loss": {"name": "cross_entropy"}})


def gradient_check(backend: Any, world: Any) -> dict[str, Any]:
    """Sharded gradients against those of a replica, made whole on every rank; weights afterwards as before.

    The replica is backend torch with the weights of this moment on this rank's share of the data alone, its gradients
    added up over the ranks. Groups are given so that one rank has nothing to do.
    """
    from services.trainer.backends.torch import TorchBackend

    before = _whole(backend)
    (groups,) = [_datums(backend.vocabulary)[:1]]
    backend.forward_backward(groups, LOSS)
    found = {name: _full(item.grad) for name, item in backend._parameters.items()}
    replica = TorchBackend(Path(backend.policy.path), _plain(backend), 0)
    with torch.no_grad():
        for name, item in replica.masters.tensors.items():
            item.copy_(before[name])
    replica.forward_backward(groups if world.rank == 0 else _datums(backend.vocabulary)[:0], LOSS)
    wanted = {}
    for name, item in replica.masters.tensors.items():
        total = item.grad if item.grad is not None else torch.zeros_like(item)
        torch.distributed.all_reduce(total)
        wanted[name] = total
    backend._forget_gradient()
    after = _whole(backend)
    return {
        "error": max(float((found[name] - wanted[name]).abs().max()) for name in wanted),
        "size": max(float(item.abs().max()) for item in wanted.values()),
        "gradient": _digest(found), "weights": _digest(after), "weights_before": _digest(before),
    }  # fmt: skip


def _datums(vocabulary: int) -> list[list[Datum]]:
    return [
        [
            Datum(item.token_ids, item.loss_mask.astype("float32"), item.sampler_logprobs, item.sampler_logprobs)
            for item in group.samples
        ]
        for group in case_a11(vocabulary, 9)
    ]


def _plain(backend: Any) -> Any:
    from paceline.config.trainer import TrainerConfig

    return TrainerConfig(tokens_per_micro_batch=backend._budget)


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _whole(backend: Any) -> dict[str, torch.Tensor]:
    return {name: _full(item.detach()).clone() for name, item in backend._parameters.items()}


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return total.hexdigest()


PROBES["gradients 1x2"] = PROBES["gradients 2x1"] = gradient_check

import megatron_probes  # noqa: E402, F401  registers those of backend megatron
