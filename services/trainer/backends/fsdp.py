"""Ranks that shard a transformers model with FSDP2: each its own micro-batches, all one update.

Parameters are sharded over `shard` ranks and copied `replicate` times (hybrid sharding), but data is split over all
ranks: the logical data-parallel domain is the world. Gradients are sums over it, never means.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

from paceline.config import ConfigError
from paceline.config.trainer import TrainerConfig
from paceline.plugins import registry
from services.trainer.backends.results import StepOutcome
from services.trainer.backends.torch import TorchBackend
from services.trainer.batching import plan_ranks
from services.trainer.datum import Datum
from services.trainer.model.export import export_model
from services.trainer.model.layers import decoder_layers
from services.trainer.model.masters import Masters
from services.trainer.model.policy import Policy
from services.trainer.model.shards import Piece
from services.trainer.model.state import StateCopy
from services.trainer.packing import PackedBatch, Row, empty_batch, pack, row_cost
from services.trainer.ranks.world import World
from services.trainer.token_batch import TokenBatch


class Around(nn.Module):
    """The root of the sharding: parameters outside of the blocks are whole while a pass runs in its forward."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[..., tuple[Tensor, ...]], *arguments: Any) -> tuple[Tensor, ...]:
        """The tensors of work(*arguments)."""
        return work(*arguments)


@registry("train_backend").register("fsdp")
class FsdpBackend(TorchBackend):
    """See TrainBackend."""

    def __init__(self, path: Path, config: TrainerConfig, seed: int, world: World | None = None) -> None:
        if config.lora is not None:
            raise ConfigError(
                "trainer.lora: backend 'fsdp' trains all parameters; use backend = 'torch' for an adapter"
            )
        world = world or World.single(config.device)
        if world.size > 1 and config.teachers:
            raise ConfigError(
                "trainer.teachers: backend 'fsdp' has no teacher models; let the datums carry their scores"
            )
        parallel = config.parallel
        self._shard = world.size // parallel.replicate
        mesh = init_device_mesh(
            world.device.type, (parallel.replicate, self._shard), mesh_dim_names=("replicate", "shard")
        )
        self._mesh: Any = mesh if parallel.replicate > 1 else mesh["shard"]
        self._offload = parallel.cpu_offload
        self._by_flops = parallel.balance == "flops"
        self._rank_of_copy = world.rank // self._shard
        super().__init__(path, config, seed, world)

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """See TrainBackend.optim_step."""
        for name, parameter in self._parameters.items():
            gradient = parameter.grad
            self.masters.tensors[name].grad = None if gradient is None else cast(Any, gradient)._local_tensor
        outcome = super().optim_step(denominator, learning_rate)
        self._forget_gradient()
        return outcome

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """See TrainBackend.load_state."""
        super().load_state(directory, optimizer)
        self._forget_gradient()

    def weights(self) -> dict[str, Tensor]:
        """See TrainBackend.weights. Gathered one by one, onto rank 0's host."""
        found = {}
        for name, parameter in self._parameters.items():
            whole = parameter.detach().to(self._world.device, self._dtype).full_tensor()  # type: ignore[attr-defined]
            if self._world.rank == 0:
                found[name] = whole.cpu()
        return found

    def export(self, directory: Path) -> None:
        """See TrainBackend.export."""
        whole = self.weights()
        if self._world.rank == 0:
            export_model(self.policy, whole, directory, self._dtype)

    def _load_device(self, config: TrainerConfig) -> str:
        return "cpu"

    def _make_masters(self, config: TrainerConfig) -> Masters:
        for policy in [self.policy] + ([self._reference] if self._reference is not None else []):
            self._distribute(policy)
        self._parameters = dict(self.policy.model.named_parameters())
        # The same memory as the shards, so that an update of these is one of those.
        locals_ = {name: cast(Any, item)._local_tensor.detach() for name, item in self._parameters.items()}
        pieces = {name: self._piece(item, locals_[name]) for name, item in self._parameters.items()}
        return Masters(locals_, torch.float32, config.optimizer, pieces, self._add_up)

    def _distribute(self, policy: Policy) -> None:
        """Shard block by block, then the rest. Computing in a shorter type, gradients are still summed in float32."""
        options: dict[str, Any] = {
            "mesh": self._mesh, "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if self._dtype == torch.float32 else self._dtype, reduce_dtype=torch.float32
            ),
        }  # fmt: skip
        if self._offload:
            options["offload_policy"] = CPUOffloadPolicy()
        root = Around(policy.model)
        for module in (*decoder_layers(policy.model), root):
            sharded = cast(FSDPModule, fully_shard(module, **options))
            # Sums, which gloo has no other operation for: NCCL's scaled sum is not asked for.
            sharded.set_force_sum_reduction_for_comms(True)
            sharded.set_gradient_divide_factor(1.0)
        policy.around = root
        policy.device = self._world.device

    def _piece(self, parameter: Tensor, local: Tensor) -> Piece:
        shape = tuple(parameter.shape)
        rows = -(-shape[0] // self._shard)
        start = min((self._world.rank % self._shard) * rows, shape[0])
        assert len(local) == min(rows, shape[0] - start), (shape, tuple(local.shape), self._shard)
        return Piece(start, shape)

    def _add_up(self, square: float) -> float:
        """Sum over the ranks that share a copy; other copies have the same."""
        squares = self._world.gather(np.float64(square).tobytes())
        first = self._rank_of_copy * self._shard
        return float(sum(np.frombuffer(item)[0] for item in squares[first : first + self._shard]))

    def _forget_gradient(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    def _backward(self, total: Tensor, tokens: TokenBatch) -> None:
        # Also where no token counts: every rank must take part in every reduction.
        (total + tokens.policy_logprobs.sum() * 0.0).backward()

    def _state_copy(self) -> StateCopy:
        copy = super()._state_copy()
        copy.rank = self._world.rank
        copy.writes_tensors = self._rank_of_copy == 0
        return copy

    def _packed(self, rows: list[list[Row]], data: list[Datum], every_token: bool) -> list[PackedBatch]:
        """This rank's micro-batches: as many as every other rank has, empty ones included."""
        size = self.policy.hidden_size
        costs = [sum(row_cost(row.width, size) if self._by_flops else row.width for row in items) for items in rows]
        plan = plan_ranks(self._plan(rows), costs, self._world.size)[self._world.rank]
        return [
            pack([row for index in members for row in rows[index]], data, every_token, self.policy.streams)
            if members
            else empty_batch()
            for members in plan
        ]
