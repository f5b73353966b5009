"""The default backend: one process, transformers' model code, CPU or one GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config.trainer import TrainerConfig
from paceline.plugins import registry
from services.trainer.backends.results import PassResult, StepOutcome, add_over_ranks
from services.trainer.batching import plan_micro_batches, plan_streams
from services.trainer.datum import Datum, Group
from services.trainer.gathering import gather_tokens, gather_topk_ids, groups_of, scatter_tokens, token_zeros
from services.trainer.loss_metrics import merge
from services.trainer.model.dtypes import DTYPES
from services.trainer.model.export import export_model
from services.trainer.model.host_swap import HostSwap
from services.trainer.model.layers import checkpoint_activations, compile_layers
from services.trainer.model.masters import Masters
from services.trainer.model.policy import Policy
from services.trainer.model.routing import RoutingReplay
from services.trainer.model.state import BackgroundSave, StateCopy, restore_rng, rng_state
from services.trainer.model.teachers import Teachers
from services.trainer.objective import Objective
from services.trainer.packing import PackedBatch, Row, pack, rows_of
from services.trainer.ranks.world import World
from services.trainer.token_batch import TokenBatch, unmasked


@registry("train_backend").register("torch")
class TorchBackend:
    """See TrainBackend. `share_prefix` and `dtype` are for tests: they override what the configuration says."""

    def __init__(
        self, path: Path, config: TrainerConfig, seed: int, world: World | None = None, *, share_prefix: bool = True,
        dtype: str | None = None,
    ) -> None:  # fmt: skip
        self._world = world or World.single(config.device)
        torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._dtype = DTYPES[dtype or config.dtype]
        self._budget = config.tokens_per_micro_batch
        self.policy = Policy(path, self._dtype, config.lora, seed, self._load_device(config))
        self._share_prefix = share_prefix and self.policy.shares_prefixes
        self.kind = "adapter" if config.lora is not None else "full"
        self.vocabulary = self.policy.vocabulary
        self._reference: Policy | None = None
        if config.needs_reference and config.lora is None:
            self._reference = Policy(path, self._dtype, None, seed, self._load_device(config), frozen=True)
        self._teachers: Teachers | None = None
        if config.teachers:
            self._teachers = Teachers(config.teachers, self._dtype, str(self._world.device), self.vocabulary)
        if config.routing_replay:
            self.policy.replay = RoutingReplay(self.policy.model, path)
        if config.parallel.activation_checkpointing:
            checkpoint_activations(self.policy.model)
        if config.compile:
            compile_layers(self.policy.model)
        self.masters = self._make_masters(config)
        self._dropout = config.lora is not None and config.lora.dropout > 0
        self._saving = BackgroundSave()
        self._swap = HostSwap(self.policy.device, self._resident)
        torch.manual_seed(seed)

    def forward(self, groups: Sequence[Group], reference: bool = False) -> list[list[np.ndarray]]:
        """See TrainBackend.forward."""
        data = self._checked(groups)
        result = token_zeros(groups)
        flat = [item for group in result for item in group]
        for batch in self._batches(groups, data, every_token=True):
            logprobs = self._reference_logprobs(batch) if reference else self._plain_score(self.policy, batch)
            scatter_tokens(logprobs, batch.datum_index, batch.token_index, flat)
        self._world.sum_arrays(flat)
        return result

    def forward_backward(
        self, groups: Sequence[Group], objective: Objective, reference: bool = False, every_token: bool = False
    ) -> PassResult:
        """See TrainBackend.forward_backward."""
        data = self._checked(groups)
        result = PassResult(
            policy_logprobs=token_zeros(groups), num_tokens=sum(int((d.weights != 0).sum()) for d in data)
        )
        flat = [item for group in result.policy_logprobs for item in group]
        group_of_datum = groups_of(groups)
        self.policy.set_dropout(self._dropout)
        for batch in self._batches(groups, data, every_token):
            if not len(batch.targets):
                self._idle(batch, objective, reference)
                continue
            tokens = self._tokens(batch, data, group_of_datum, objective, reference)
            sums = objective(tokens)
            self._backward(sums.total, tokens)
            result.loss_sum += sums.total.item()
            if tokens.entropy is not None:
                sums.metrics["entropy_sum"] = unmasked(tokens.entropy.detach(), tokens.mask).sum()
            merge(result.metrics, {name: float(value) for name, value in sums.metrics.items()})
            scatter_tokens(tokens.policy_logprobs.detach(), batch.datum_index, batch.token_index, flat)
        self.policy.set_dropout(False)
        if self.policy.replay is not None:
            merge(result.metrics, self.policy.replay.take_counts())
        add_over_ranks(result, flat, self._world)
        return result

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """See TrainBackend.optim_step."""
        if not denominator > 0:
            raise ValueError(f"denominator {denominator} must be positive")
        return self.masters.step(denominator, learning_rate)

    def sleep(self) -> None:
        """Leave the device for the host's memory. Repeated, it does nothing."""
        self._swap.sleep()

    def wake(self) -> None:
        """Come back to the device. Repeated, it does nothing."""
        self._swap.wake()

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""
        return self.masters.updates

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        """See TrainBackend.save_state."""
        self._saving.save(self._state_copy(), directory, optimizer, background)

    def finish_save(self) -> None:
        """See TrainBackend.finish_save."""
        self._saving.finish()

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """See TrainBackend.load_state."""
        self.masters.load_state(directory, optimizer)
        restore_rng(directory, self._world.rank, self.policy.device)

    def weights(self) -> dict[str, Tensor]:
        """See TrainBackend.weights."""
        source: dict[str, Any] = self.masters.tensors if self.kind == "adapter" else self.policy.trainable
        return {name: item.detach() for name, item in source.items()}

    def adapter_config(self) -> dict[str, Any] | None:
        """See TrainBackend.adapter_config."""
        if self.policy.peft is None:
            return None
        config = self.policy.peft.peft_config["default"].to_dict()
        config["base_model_name_or_path"] = None
        config["inference_mode"] = True
        return json.loads(json.dumps(config, default=_plain, sort_keys=True))

    def export(self, directory: Path) -> None:
        """See TrainBackend.export."""
        export_model(self.policy, self.masters.tensors, directory, self._dtype)

    def _state_copy(self) -> StateCopy:
        copy = self.masters.state()
        copy.rng = rng_state(self.policy.device)
        return copy

    # What a backend of several ranks does otherwise.

    def _load_device(self, config: TrainerConfig) -> str:
        return config.device

    def _make_masters(self, config: TrainerConfig) -> Masters:
        return Masters(self.policy.trainable, self._dtype, config.optimizer)

    def _packed(self, rows: list[list[Row]], data: list[Datum], every_token: bool) -> list[PackedBatch]:
        """The micro-batches that this rank puts through the model, given the rows of each group."""
        return [
            pack([row for index in members for row in rows[index]], data, every_token, self.policy.streams)
            for members in self._plan(rows)
        ]

    def _plan(self, rows: list[list[Row]]) -> list[list[int]]:
        """Indices of the groups of each micro-batch."""
        if self.policy.streams:
            return plan_streams([sum(row.width for row in items) for items in rows], self._budget)
        return plan_micro_batches([(len(items), max(row.width for row in items)) for items in rows], self._budget)

    def _idle(self, batch: PackedBatch, objective: Objective, reference: bool) -> None:
        """An empty micro-batch: take part in the others' collectives, and add nothing."""
        if reference:
            self._reference_logprobs(batch)
        self.policy.scores(batch, None, objective.needs_entropy).logprobs.sum().backward()

    def _backward(self, total: Tensor, tokens: TokenBatch) -> None:
        if tokens.mask.any():
            total.backward()

    def _resident(self) -> list[Tensor]:
        models = [self.policy.model] + ([self._reference.model] if self._reference is not None else [])
        models += self._teachers.models if self._teachers is not None else []
        tensors = [item for model in models for item in (*model.parameters(), *model.buffers())]
        return tensors + self.masters.resident()

    def _checked(self, groups: Sequence[Group]) -> list[Datum]:
        data = [datum for group in groups for datum in group]
        for datum in data:
            datum.check(self.vocabulary)
            if self.policy.replay is not None:
                self.policy.replay.check(datum)
        return data

    def _batches(self, groups: Sequence[Group], data: list[Datum], every_token: bool) -> list[PackedBatch]:
        """Micro-batches that hold every group with a token to predict."""
        rows: list[list[Row]] = []
        first = 0
        for group in groups:
            wanted = any(len(d.token_ids) > 1 if every_token else d.weights.any() for d in group)
            if wanted:
                rows.append(rows_of(group, first, self.policy.hidden_size, self._share_prefix))
            first += len(group)
        return self._packed(rows, data, every_token)

    def _tokens(
        self, batch: PackedBatch, data: list[Datum], group_of_datum: np.ndarray, objective: Objective, reference: bool
    ) -> TokenBatch:
        """The forward pass of a micro-batch, of the policy and of the models that the objective compares it to."""
        given: dict[str, Tensor] = {}
        ids = None
        if reference:
            given["reference_logprobs"] = self._reference_logprobs(batch)
        if self._teachers is not None and (objective.needs_teacher or objective.needs_topk):
            taught = self._teachers.score(batch, data, objective.needs_topk)
            ids = taught.ids
            given.update(teacher_logprobs=taught.logprobs, teacher_topk_logprobs=taught.topk)
        elif objective.needs_topk:
            ids = gather_topk_ids(data, batch.datum_index, batch.token_index, self.policy.device)
        scores = self.policy.scores(batch, ids, objective.needs_entropy)
        return gather_tokens(
            data, batch.datum_index, batch.token_index, group_of_datum, scores.logprobs, entropy=scores.entropy,
            policy_topk_logprobs=scores.chosen, **given,
        )  # fmt: skip

    def _plain_score(self, policy: Policy, batch: PackedBatch) -> Tensor:
        with torch.no_grad():
            return policy.score(batch)[0]

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor:
        policy = self._reference or self.policy
        if self._reference is None and self.policy.peft is None:
            raise ValueError("no reference was loaded; see TrainerConfig.needs_reference")
        # The reference chooses its experts itself, as the model that it is.
        with policy.without_adapter():
            return self._plain_score(policy, replace(batch, routing=None))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)
