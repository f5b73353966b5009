"""Float32 master parameters and their AdamW: what is trained, whatever type the model computes in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor, nn

from paceline.config.trainer import OptimizerConfig
from paceline.rpc import errors
from services.trainer.backends.base import StepOutcome

PARAMETERS, OPTIMIZER, OPTIMIZER_META = "parameters.safetensors", "optimizer.safetensors", "optimizer.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Masters:
    """Masters by name, their pending gradient (float32, a sum) and their optimizer.

    When the model computes in a shorter type, each parameter becomes a copy of its master in that type, and its
    gradient is added to the master's as soon as it is complete. Otherwise masters and parameters are the same tensors.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], compute: torch.dtype, config: OptimizerConfig) -> None:
        self._config = config
        self._copies: dict[str, nn.Parameter] = {}
        self.tensors: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            parameter.requires_grad_(True)
            if parameter.dtype == compute:
                self.tensors[name] = parameter
                continue
            master = parameter.detach().clone()
            parameter.data = master.to(compute)
            self.tensors[name] = master
            self._copies[name] = parameter
            parameter.register_post_accumulate_grad_hook(_gradient_mover(master))
        decayed = [item for item in self.tensors.values() if item.ndim > 1]
        others = [item for item in self.tensors.values() if item.ndim <= 1]
        self._optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}],
            lr=config.learning_rate, betas=config.betas, eps=config.eps, fused=True,
        )  # fmt: skip
        self.updates = 0

    @property
    def pending(self) -> bool:
        """Whether a gradient waits for a step."""
        return any(item.grad is not None for item in self.tensors.values())

    @torch.no_grad()
    def step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """Divide the pending gradient, clip its norm, update, clear. A gradient that is not finite changes nothing."""
        if not self.pending:
            return StepOutcome(False, 0.0)
        for item in self.tensors.values():
            if item.grad is None:
                item.grad = torch.zeros_like(item)
        gradients = [item.grad for item in self.tensors.values() if item.grad is not None]
        norm = torch.stack([item.norm() for item in gradients]).double().norm().item() / denominator
        if not torch.isfinite(torch.tensor(norm)):
            self.clear()
            return StepOutcome(False, norm)
        scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6)) / denominator
        for item in gradients:
            item.mul_(scale)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        self._optimizer.step()
        self.clear()
        self.copy_down()
        self.updates += 1
        return StepOutcome(True, norm)

    def clear(self) -> None:
        """Forget the pending gradient."""
        for item in self.tensors.values():
            item.grad = None

    @torch.no_grad()
    def copy_down(self) -> None:
        """Give the model its masters, rounded to the compute type."""
        for name, copy in self._copies.items():
            copy.copy_(self.tensors[name])

    def state(self) -> dict[str, bytes]:
        """Files that hold masters, moments and the number of updates, exactly."""
        moments: dict[str, Tensor] = {}
        for name, item in self.tensors.items():
            for key, value in self._optimizer.state.get(item, {}).items():
                moments[f"{key}.{name}"] = value.detach().contiguous()
        masters = {name: item.detach().contiguous() for name, item in self.tensors.items()}
        meta = {"updates": self.updates, "algorithm": "adamw"}
        return {
            PARAMETERS: safetensors.torch.save(masters),
            OPTIMIZER: safetensors.torch.save(moments),
            OPTIMIZER_META: json.dumps(meta, sort_keys=True).encode(),
        }

    @torch.no_grad()
    def load_state(self, files: Callable[[str], Path]) -> None:
        """Take over what `state` wrote. FailedPrecondition when the tensors are not those of this policy."""
        parameters = safetensors.torch.load_file(files(PARAMETERS))
        self._check(parameters, files(PARAMETERS))
        moments = safetensors.torch.load_file(files(OPTIMIZER))
        for name, item in self.tensors.items():
            item.copy_(parameters[name])
            self._optimizer.state.pop(item, None)
            if f"step.{name}" in moments:
                # Copies, not views of the file: alignment of memory must not depend on where a state came from.
                self._optimizer.state[item] = {key: moments[f"{key}.{name}"].clone() for key in _MOMENTS}
        self.updates = int(json.loads(files(OPTIMIZER_META).read_bytes())["updates"])
        self.clear()
        self.copy_down()

    def _check(self, parameters: dict[str, Tensor], path: Path) -> None:
        missing = sorted(set(self.tensors) ^ set(parameters))
        if missing:
            raise errors.FailedPrecondition(
                f"{path} does not hold this policy: {len(missing)} tensors differ, the first is {missing[0]!r}; were "
                "trainer.lora or model.path changed since it was written?"
            )
        for name, item in self.tensors.items():
            if item.shape != parameters[name].shape:
                raise errors.FailedPrecondition(
                    f"{path}: {name} has shape {list(parameters[name].shape)}, the policy has {list(item.shape)}"
                )


def _gradient_mover(master: Tensor) -> Callable[[Any], None]:
    def move(parameter: Any) -> None:
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move
