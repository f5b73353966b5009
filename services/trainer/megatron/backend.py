"""A policy in megatron-core over ranks that share matrices, layers, sequences, experts and data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
import transformers
from torch import Tensor

from paceline.config.trainer import TrainerConfig
from services.trainer.backends.results import PassResult, StepOutcome, add_over_ranks
from services.trainer.batching import plan_ranks, plan_streams
from services.trainer.datum import Datum, Group
from services.trainer.gathering import gather_tokens, groups_of, scatter_tokens, token_zeros
from services.trainer.loss_metrics import merge
from services.trainer.megatron import passes
from services.trainer.megatron.collecting import collect
from services.trainer.megatron.compat import define_missing_gemm
from services.trainer.megatron.layout import lay_out
from services.trainer.megatron.model import Stage
from services.trainer.megatron.parameters import Found, TensorSource, entries_of, tensor_names, whole_tensors
from services.trainer.megatron.state import load, state_copy
from services.trainer.megatron.stream import Stream, stream_of
from services.trainer.megatron.updates import Updates
from services.trainer.model.dtypes import DTYPES
from services.trainer.model.export import write_folder
from services.trainer.model.shards import PieceReader
from services.trainer.model.state import BackgroundSave, restore_rng
from services.trainer.objective import Objective
from services.trainer.packing import row_cost
from services.trainer.ranks.world import World
from services.trainer.token_batch import unmasked


class Replica:
    """See TrainBackend, whose calls these are. Runs inside of `cpu.devices`."""

    def __init__(self, path: Path, config: TrainerConfig, seed: int, world: World) -> None:
        torch.set_num_threads(config.threads)
        if world.device.type == "cpu":
            torch.use_deterministic_algorithms(True, warn_only=True)
        define_missing_gemm()
        self._world, self._path = world, path
        self._dtype = DTYPES[config.dtype]
        self._by_flops = config.parallel.balance == "flops"
        self.layout = lay_out(config.parallel, world, seed)
        self._budget = config.tokens_per_micro_batch * self.layout.context.size
        self.stage = Stage(path, config.parallel, self.layout, self._dtype, world.device)
        self.entries = entries_of(self.stage)
        self.updates = Updates(self.stage, config.optimizer, world)
        source = TensorSource(PieceReader(path), self.stage.family)
        for entry in self.entries:
            self.updates.write(entry, source.read(entry), None)
        self._reference: Stage | None = None
        if config.needs_reference:
            self._reference = Stage(path, config.parallel, self.layout, self._dtype, world.device)
            for entry in entries_of(self._reference):
                entry.parameter.requires_grad_(False).copy_(source.read(entry))
        self._saving = BackgroundSave()
        torch.manual_seed(seed)

    def forward(self, groups: Sequence[Group], reference: bool) -> list[list[np.ndarray]]:
        """See TrainBackend.forward."""
        data = self._checked(groups)
        result = token_zeros(groups)
        flat = [item for group in result for item in group]
        streams = self._streams(groups, data, every_token=True)
        found = passes.logprobs(self._reference_stage() if reference else self.stage, streams)
        if self.layout.counts:
            for stream, values in zip(streams, found, strict=True):
                scatter_tokens(values, stream.datum_index, stream.token_index, flat)
        self._world.sum_arrays(flat)
        return result

    def forward_backward(
        self, groups: Sequence[Group], objective: Objective, reference: bool, every_token: bool
    ) -> PassResult:
        """See TrainBackend.forward_backward."""
        data = self._checked(groups)
        result = PassResult(
            policy_logprobs=token_zeros(groups), num_tokens=sum(int((d.weights != 0).sum()) for d in data)
        )
        flat = [item for group in result.policy_logprobs for item in group]
        streams = self._streams(groups, data, every_token)
        known = passes.logprobs(self._reference_stage(), streams) if reference else []
        group_of_datum = groups_of(groups)

        def score(number: int, logprobs: Tensor, entropy: Tensor) -> Tensor:
            # Every micro-batch takes part in the collectives of its backward pass, whatever counts in it.
            nothing = logprobs.masked_fill(torch.ones_like(logprobs, dtype=torch.bool), 0.0).sum()
            stream = streams[number]
            if not len(stream.targets):
                return nothing
            given = {"reference_logprobs": known[number]} if known else {}
            tokens = gather_tokens(
                data, stream.datum_index, stream.token_index, group_of_datum, logprobs, entropy=entropy, **given
            )
            sums = objective(tokens)
            if self.layout.counts:
                sums.metrics["entropy_sum"] = unmasked(entropy.detach(), tokens.mask).sum()
                result.loss_sum += sums.total.item()
                merge(result.metrics, {name: float(value) for name, value in sums.metrics.items()})
                scatter_tokens(logprobs.detach(), stream.datum_index, stream.token_index, flat)
            return sums.total + nothing if tokens.mask.any() else nothing

        passes.train(self.stage, self.updates.model, streams, score, objective.needs_entropy)
        self.updates.pending |= result.num_tokens > 0
        add_over_ranks(result, flat, self._world)
        return result

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """See TrainBackend.optim_step."""
        if not denominator > 0:
            raise ValueError(f"denominator {denominator} must be positive")
        return self.updates.step(denominator, learning_rate)

    def save_state(self, directory: Path, optimizer: bool, background: bool) -> None:
        """See TrainBackend.save_state."""
        copy = state_copy(self.stage, self.entries, self.updates, self._world)
        self._saving.save(copy, directory, optimizer, background)

    def finish_save(self) -> None:
        """See TrainBackend.finish_save."""
        self._saving.finish()

    def load_state(self, directory: Path, optimizer: bool) -> None:
        """See TrainBackend.load_state."""
        load(directory, optimizer, self.stage, self.entries, self.updates)
        restore_rng(directory, self._world.rank, self._world.device)

    def weights(self) -> dict[str, Tensor]:
        """See TrainBackend.weights."""
        return collect(self._parts(), self._world)

    def export(self, directory: Path) -> None:
        """See TrainBackend.export."""
        whole = self.weights()
        if self._world.rank != 0:
            return
        wanted = tensor_names(self.stage.family, self.stage.config.num_layers, self.stage.tied)
        if set(whole) != wanted:
            raise RuntimeError(f"these tensors were not gathered, or are too many: {sorted(set(whole) ^ wanted)}")
        generation = None
        if (self._path / "generation_config.json").is_file():
            generation = transformers.GenerationConfig.from_pretrained(self._path)
        write_folder(whole, self.stage.source, generation, self._path, directory, self._dtype)

    def _parts(self) -> Iterator[Found]:
        """Whole tensors in the compute type, each on one rank, of which rank 0 is one."""
        return whole_tensors(
            self.entries, lambda entry: entry.parameter.detach(),
            lambda index, entry: entry.replicas.rank == 0 and entry.sharers.rank == 0,
            self.stage.config.num_moe_experts or 0,
        )  # fmt: skip

    def _reference_stage(self) -> Stage:
        if self._reference is None:
            raise ValueError("no reference was loaded; see TrainerConfig.needs_reference")
        return self._reference

    def _checked(self, groups: Sequence[Group]) -> list[Datum]:
        data = [datum for group in groups for datum in group]
        for datum in data:
            datum.check(self.stage.vocabulary)
        return data

    def _streams(self, groups: Sequence[Group], data: list[Datum], every_token: bool) -> list[Stream]:
        """This rank's micro-batches: as many as every other rank has, empty ones included."""
        members: list[range] = []
        first = 0
        for group in groups:
            if any(len(d.token_ids) > 1 if every_token else d.weights.any() for d in group):
                members.append(range(first, first + len(group)))
            first += len(group)
        lengths = [[len(data[index].token_ids) for index in item] for item in members]
        size = self.stage.config.hidden_size
        costs = [sum(row_cost(n, size) if self._by_flops else n for n in item) for item in lengths]
        plan = plan_ranks(plan_streams([sum(item) for item in lengths], self._budget), costs, self.layout.data.size)
        return [
            stream_of([index for part in batch for index in members[part]], data, every_token, self.stage.multiple)
            for batch in plan[self.layout.data.rank]
        ]
