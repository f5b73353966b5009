"""AdamW by megatron-core's distributed optimizer: float32 masters and moments, of which each replica keeps a part."""

from __future__ import annotations

import math
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor

from paceline.config.trainer import OptimizerConfig
from services.trainer.backends.results import StepOutcome
from services.trainer.megatron.compat import set_weight_decay
from services.trainer.megatron.model import Stage
from services.trainer.megatron.parameters import Entry
from services.trainer.ranks.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")


class Updates:
    """The pending gradient of a stage, a sum, and its optimizer. `model` is the stage's model, wrapped for it."""

    def __init__(self, stage: Stage, config: OptimizerConfig, world: World) -> None:
        self._config, self._world = config, world
        half = stage.config.params_dtype != torch.float32
        sharing = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, overlap_grad_reduce=False,
            average_in_collective=False,
        )  # fmt: skip
        self.model = DistributedDataParallel(stage.config, sharing, stage.model)
        settings = MegatronOptimizerConfig(
            optimizer="adam", lr=config.learning_rate, weight_decay=config.weight_decay, adam_beta1=config.betas[0],
            adam_beta2=config.betas[1], adam_eps=config.eps, clip_grad=0.0, bf16=half,
            params_dtype=stage.config.params_dtype, use_distributed_optimizer=True,
        )  # fmt: skip
        self._optimizer: Any = get_megatron_optimizer(settings, [self.model], use_gloo_process_groups=False)
        set_weight_decay(self._optimizer, config.weight_decay)
        self.pending = False
        """Whether a gradient waits for a step: the same on all ranks."""
        self.updates = 0
        self.moment_updates = 0
        """Updates that are in the moments; fewer than `updates` where those started anew."""

    @torch.no_grad()
    def step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """Sum over ranks, divide, clip the norm, update, clear. A gradient that is not finite changes nothing."""
        if not self.pending:
            return StepOutcome(False, 0.0)
        finalize_model_grads([self.model])
        self._optimizer.prepare_grads()
        norm = math.sqrt(self._square()) / denominator
        if not math.isfinite(norm):
            self.clear()
            return StepOutcome(False, norm)
        scale = min(1.0, self._config.max_grad_norm / (norm + 1e-6)) / denominator
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
            for item in group["params"]:
                item.grad.mul_(scale)
        self._optimizer.step_with_ready_grads()
        self.clear()
        self.updates += 1
        self.moment_updates += 1
        return StepOutcome(True, norm)

    def _square(self) -> float:
        """Square of the norm of the summed gradient: every number of it is counted on one rank, in order of ranks."""
        gradients = [item for part in self._parts for item in part.get_main_grads_for_grad_norm()]
        own = torch.stack([item.norm() for item in gradients]).double().square().sum().item() if gradients else 0.0
        return float(sum(np.frombuffer(item)[0] for item in self._world.gather(np.float64(own).tobytes())))

    @property
    def _parts(self) -> list[Any]:
        """megatron-core has one optimizer for dense parameters and one for experts."""
        return [item for item in self._optimizer.chained_optimizers if not item.is_stub_optimizer]

    def clear(self) -> None:
        """Forget the pending gradient."""
        self.model.zero_grad_buffer()
        self._optimizer.zero_grad()
        self.pending = False

    @torch.no_grad()
    def read(self, entry: Entry, key: str = "") -> Tensor:
        """This rank's whole master of a parameter, or the moment `key` of it, float32. Collective over replicas."""
        parameter = entry.parameter
        flat = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        own = self._own(entry)
        if own is not None:
            start, master, state = own
            flat[start : start + master.numel()] = state[key] if key else master
        if entry.replicas.size > 1:
            dist.all_reduce(flat, group=entry.replicas.group)
        return flat.view(parameter.shape)

    @torch.no_grad()
    def write(self, entry: Entry, master: Tensor, moments: dict[str, Tensor] | None) -> None:
        """Set a parameter of this rank, its master and its moments, all float32 in its shape; None: moments anew."""
        entry.parameter.data.copy_(master)
        own = self._own(entry)
        if own is None:
            return
        start, item, state = own
        place = slice(start, start + item.numel())
        item.data.copy_(master.reshape(-1)[place])
        state.clear()
        if moments is not None:
            state["step"] = torch.tensor(float(self.moment_updates))
            for key in MOMENTS:
                state[key] = moments[key].reshape(-1)[place].to(item.device, copy=True)

    def _own(self, entry: Entry) -> tuple[int, Tensor, dict[str, Any]] | None:
        """Where this replica's part of a parameter starts, its master and its moments. None: it has none of it."""
        parameter = cast(Any, entry.parameter)
        for part in self._parts:
            if parameter in part.model_param_gbuf_map:
                group, place = part.model_param_group_index_map[parameter]
                master = part.optimizer.param_groups[group]["params"][place]
                return part._get_model_param_range_map(parameter)["param"].start, master, part.optimizer.state[master]
        return None
