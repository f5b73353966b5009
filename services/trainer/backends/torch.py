"""The default backend: one process, transformers' model code, CPU or one GPU."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from paceline.config.trainer import TrainerConfig
from paceline.plugins import registry
from services.trainer.backends.base import LossFunction, PassResult, StepOutcome
from services.trainer.batching import plan_micro_batches
from services.trainer.datum import Datum, Group
from services.trainer.gathering import gather_tokens, groups_of
from services.trainer.loss_metrics import merge
from services.trainer.model.export import export_model
from services.trainer.model.masters import Masters
from services.trainer.model.policy import Policy
from services.trainer.model.state import BackgroundSave, restore_rng, rng_state
from services.trainer.packing import PackedBatch, Row, pack, rows_of
from services.trainer.ranks.world import World

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@registry("train_backend").register("torch")
class TorchBackend:
    """See TrainBackend. `share_prefix` and `dtype` are for tests: they override what the configuration says."""

    def __init__(
        self, path: Path, config: TrainerConfig, seed: int, world: World | None = None, *, share_prefix: bool = True,
        dtype: str | None = None,
    ) -> None:  # fmt: skip
        del world  # one process
        torch.set_num_threads(config.threads)
        torch.use_deterministic_algorithms(True, warn_only=True)
        self._dtype = _DTYPES[dtype or config.dtype]
        self._budget = config.tokens_per_micro_batch
        self.policy = Policy(path, self._dtype, config.lora, seed, config.device)
        self._share_prefix = share_prefix and self.policy.shares_prefixes
        self.kind = "adapter" if config.lora is not None else "full"
        self.vocabulary = self.policy.vocabulary
        self._reference: Policy | None = None
        if config.kl_coefficient > 0 and config.lora is None:
            self._reference = Policy(path, self._dtype, None, seed, config.device, frozen=True)
        self.masters = Masters(self.policy.trainable, self._dtype, config.optimizer)
        self._dropout = config.lora is not None and config.lora.dropout > 0
        self._saving = BackgroundSave()
        torch.manual_seed(seed)

    def forward(self, groups: Sequence[Group], reference: bool = False) -> list[list[np.ndarray]]:
        """See TrainBackend.forward."""
        data = self._checked(groups)
        result = _zeros(groups)
        flat = [item for group in result for item in group]
        for batch in self._batches(groups, data, every_token=True):
            logprobs = self._reference_logprobs(batch) if reference else self._plain_score(self.policy, batch)
            _scatter(batch, logprobs, flat)
        return result

    def forward_backward(
        self, groups: Sequence[Group], objective: LossFunction, reference: bool = False, every_token: bool = False
    ) -> PassResult:
        """See TrainBackend.forward_backward."""
        data = self._checked(groups)
        result = PassResult(policy_logprobs=_zeros(groups), num_tokens=sum(int((d.weights != 0).sum()) for d in data))
        flat = [item for group in result.policy_logprobs for item in group]
        group_of_datum = groups_of(groups)
        self.policy.set_dropout(self._dropout)
        for batch in self._batches(groups, data, every_token):
            logprobs, entropy = self.policy.score(batch)
            tokens = gather_tokens(
                data, batch.datum_index, batch.token_index, group_of_datum, logprobs, entropy=entropy,
                reference_logprobs=self._reference_logprobs(batch) if reference else None,
            )  # fmt: skip
            sums = objective(tokens)
            if tokens.mask.any():
                sums.total.backward()
            result.loss_sum += sums.total.item()
            sums.metrics["entropy_sum"] = entropy.masked_fill(~tokens.mask, 0.0).sum()
            merge(result.metrics, {name: float(value) for name, value in sums.metrics.items()})
            _scatter(batch, logprobs.detach(), flat)
        self.policy.set_dropout(False)
        return result

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """See TrainBackend.optim_step."""
        if not denominator > 0:
            raise ValueError(f"denominator {denominator} must be positive")
        return self.masters.step(denominator, learning_rate)

    @property
    def updates(self) -> int:
        """Optimizer updates so far."""
        return self.masters.updates

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        """See TrainBackend.save_state."""
        copy = self.masters.state()
        copy.rng = rng_state(self.policy.device)
        self._saving.save(copy, directory, optimizer, background)

    def finish_save(self) -> None:
        """See TrainBackend.finish_save."""
        self._saving.finish()

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """See TrainBackend.load_state."""
        self.masters.load_state(directory, optimizer)
        restore_rng(directory, 0, self.policy.device)

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

    def _checked(self, groups: Sequence[Group]) -> list[Datum]:
        data = [datum for group in groups for datum in group]
        for datum in data:
            datum.check(self.vocabulary)
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
        shapes = [(len(items), max(row.width for row in items)) for items in rows]
        plan = plan_micro_batches(shapes, self._budget)
        return [pack([row for index in members for row in rows[index]], data, every_token) for members in plan]

    def _plain_score(self, policy: Policy, batch: PackedBatch) -> Tensor:
        with torch.no_grad():
            return policy.score(batch)[0]

    def _reference_logprobs(self, batch: PackedBatch) -> Tensor:
        policy = self._reference or self.policy
        if self._reference is None and self.policy.peft is None:
            raise ValueError("no reference was loaded; set trainer.kl_coefficient > 0")
        with policy.without_adapter() if self._reference is None else nullcontext():
            return self._plain_score(policy, batch)


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _zeros(groups: Sequence[Group]) -> list[list[np.ndarray]]:
    return [[np.zeros(len(datum.token_ids), np.float32) for datum in group] for group in groups]


def _scatter(batch: PackedBatch, values: Tensor, out: list[np.ndarray]) -> None:
    numbers = values.float().cpu().numpy()
    for datum in np.unique(batch.datum_index):
        chosen = batch.datum_index == datum
        out[datum][batch.token_index[chosen]] = numbers[chosen]
