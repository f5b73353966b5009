"""Float32 master parameters and their AdamW: what is trained, whatever type the model computes in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.config.trainer import OptimizerConfig
from paceline.rpc import errors
from services.trainer.backends.results import StepOutcome
from services.trainer.model.shards import Piece, PieceReader
from services.trainer.model.state import PARAMETERS, StateCopy, open_optimizer, read_progress

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


class Masters:
    """Masters by name, their pending gradient (float32, a sum) and their optimizer.

    When the model computes in a shorter type, each parameter becomes a copy of its master in that type, and its
    gradient is added to the master's as soon as it is complete. Otherwise masters and parameters are the same tensors.
    `pieces` says which rows of each tensor these are when ranks share it; `add_up` then sums squares over the sharers.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], compute: torch.dtype, config: OptimizerConfig,
        pieces: Mapping[str, Piece] | None = None, add_up: Callable[[float], float] = lambda square: square,
    ) -> None:  # fmt: skip
        self._config = config
        self.pieces = dict(pieces or {})
        self._add_up = add_up
        self._copies: dict[str, Tensor] = {}
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
        norms = torch._foreach_norm(gradients)  # type: ignore[attr-defined]
        square = torch.stack(norms).double().square().sum().item()
        norm = math.sqrt(self._add_up(square)) / denominator
        if not math.isfinite(norm):
            self.clear()
            return StepOutcome(False, norm)
        scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6)) / denominator
        torch._foreach_mul_(gradients, scale)  # type: ignore[attr-defined]
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
        if self._copies:
            masters = [self.tensors[name] for name in self._copies]
            torch._foreach_copy_(list(self._copies.values()), masters)  # type: ignore[attr-defined]

    def resident(self) -> list[Tensor]:
        """All tensors that it keeps on the device: masters, and the moments of the optimizer."""
        moments = [value for state in self._optimizer.state.values() for value in state.values()]
        return [*self.tensors.values(), *moments]

    def state(self) -> StateCopy:
        """This rank's masters, moments and the number of updates, exactly. Views, not copies."""
        moments: dict[str, Tensor] = {}
        pieces = dict(self.pieces)
        for name, item in self.tensors.items():
            for key, value in self._optimizer.state.get(item, {}).items():
                moments[f"{key}.{name}"] = value.detach()
                if name in self.pieces and value.ndim:
                    pieces[f"{key}.{name}"] = self.pieces[name]
        masters = {name: item.detach() for name, item in self.tensors.items()}
        return StateCopy(masters, moments, pieces, {"updates": self.updates, "algorithm": "adamw"})

    @torch.no_grad()
    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """Take over what StateCopy wrote. FailedPrecondition when the tensors are not those of this policy."""
        parameters = PieceReader(directory / PARAMETERS)
        self._check(parameters)
        moments = open_optimizer(directory, optimizer)
        progress = read_progress(directory)
        for name, item in self.tensors.items():
            item.copy_(parameters.read(name, self.pieces.get(name), len(item)))
            self._optimizer.state.pop(item, None)
            if moments is not None and f"step.{name}" in moments:
                self._optimizer.state[item] = {
                    key: moments.read(f"{key}.{name}", self.pieces.get(name), len(item)).to(item.device)
                    for key in _MOMENTS
                }
        self.updates = int(progress["updates"])
        self.clear()
        self.copy_down()

    def _check(self, parameters: PieceReader) -> None:
        path = parameters.folder
        missing = sorted(set(self.tensors) ^ set(parameters.shapes))
        if missing:
            raise errors.FailedPrecondition(
                f"{path} does not hold this policy: {len(missing)} tensors differ, the first is {missing[0]!r}; were "
                "trainer.lora or model.path changed since it was written?"
            )
        for name, item in self.tensors.items():
            shape = self.pieces[name].shape if name in self.pieces else tuple(item.shape)
            if parameters.shapes[name] != shape:
                raise errors.FailedPrecondition(
                    f"{path}: {name} has shape {list(parameters.shapes[name])}, the policy has {list(shape)}"
                )


def _gradient_mover(master: Tensor) -> Callable[[Any], None]:
    def move(parameter: Any) -> None:
        if master.grad is None:
            master.grad = parameter.grad.to(master.dtype)
        else:
            master.grad.add_(parameter.grad)
        parameter.grad = None

    return move
