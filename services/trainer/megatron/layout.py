"""Which rank has what: megatron-core's process groups for the layout of a run, and this rank's place in them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel

from paceline.config import ConfigError
from paceline.config.trainer import ParallelConfig
from services.trainer.ranks.world import World, group_kind


@dataclass(frozen=True)
class Axis:
    """One way of sharing."""

    rank: int
    size: int
    group: Any


@dataclass(frozen=True)
class Layout:
    """This rank's place. Groups are those of megatron-core, of which a process has one set at a time."""

    tensor: Axis
    pipeline: Axis
    context: Axis
    expert: Axis
    expert_tensor: Axis
    data: Axis
    """Ranks that get different micro-batches."""
    replicas: Axis
    """Ranks that have the same dense parameters: data times context."""
    expert_replicas: Axis
    """Ranks that have the same experts."""

    @property
    def first_stage(self) -> bool:
        return self.pipeline.rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline.rank == self.pipeline.size - 1

    @property
    def counts(self) -> bool:
        """Whether this rank's loss and log-probabilities are told to the others: one rank a micro-batch does."""
        return self.last_stage and self.tensor.rank == 0 and self.context.rank == 0


def lay_out(config: ParallelConfig, world: World, seed: int) -> Layout:
    """Make the groups anew. Collective over all ranks."""
    _join_alone(world)
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor, pipeline_model_parallel_size=config.pipeline,
        context_parallel_size=config.context, expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.tensor, create_gloo_process_groups=False,
    )  # fmt: skip
    if world.device.type == "cuda":
        tensor_parallel.model_parallel_cuda_manual_seed(seed)
    return Layout(
        tensor=_axis(parallel_state.get_tensor_model_parallel_group()),
        pipeline=_axis(parallel_state.get_pipeline_model_parallel_group()),
        context=_axis(parallel_state.get_context_parallel_group()),
        expert=_axis(parallel_state.get_expert_model_parallel_group()),
        expert_tensor=_axis(parallel_state.get_expert_tensor_parallel_group()),
        data=_axis(parallel_state.get_data_parallel_group()),
        replicas=_axis(parallel_state.get_data_parallel_group(with_context_parallel=True)),
        expert_replicas=_axis(parallel_state.get_expert_data_parallel_group()),
    )


def check_layout(config: ParallelConfig, model: Any, fields: dict[str, Any]) -> None:
    """ConfigError when a model's sizes cannot be shared so. `fields` are those of its family."""
    for key, parts, size in (
        ("num_key_value_heads", config.tensor, fields["num_query_groups"]),
        ("intermediate_size", config.tensor, fields["ffn_hidden_size"]),
        ("moe_intermediate_size", config.tensor, fields.get("moe_ffn_hidden_size", 0)),
        ("num_hidden_layers", config.pipeline, fields["num_layers"]),
        ("num_experts", config.expert, fields.get("num_moe_experts", 0)),
    ):
        if size % parts:
            raise ConfigError(f"trainer.parallel: {parts} ranks cannot share the model's {key} of {size} equally")
    experts = fields.get("num_moe_experts")
    if config.expert > 1 and not experts:
        raise ConfigError(f"trainer.parallel.expert = {config.expert}: {model.model_type} has no experts")
    if experts and config.tensor > 1 and not config.sequence_parallel:
        raise ConfigError(
            f"trainer.parallel: megatron-core trains experts on {config.tensor} tensor ranks with "
            "sequence_parallel = true only"
        )
    if config.sequence_parallel and config.tensor == 1:
        raise ConfigError("trainer.parallel.sequence_parallel = true has no effect with tensor = 1")


def _axis(group: Any) -> Axis:
    return Axis(group.rank(), group.size(), group)


def _join_alone(world: World) -> None:
    """megatron-core needs process groups even of one rank."""
    if not dist.is_initialized():
        if world.device.index is not None:
            torch.cuda.set_device(world.device)
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(group_kind(world.device), store=store, rank=0, world_size=1)
