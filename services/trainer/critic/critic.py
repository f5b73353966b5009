"""The critic at work: values of packed rows, updates with an optimizer of its own, state beside the policy's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.config.trainer import TrainerConfig
from paceline.rpc import errors
from paceline.telemetry import names
from services.trainer.batching import plan_micro_batches
from services.trainer.critic.value_loss import clipped_value_loss
from services.trainer.critic.value_model import ValueModel
from services.trainer.datum import Datum, Group
from services.trainer.gathering import gather_field, scatter_tokens, token_zeros
from services.trainer.model.dtypes import DTYPES
from services.trainer.model.host_swap import HostSwap
from services.trainer.model.masters import Masters
from services.trainer.model.state import BackgroundSave
from services.trainer.packing import PackedBatch, pack, rows_of
from services.trainer.step.data import cuts
from services.trainer.step.schedule import learning_rate

FOLDER = "critic"
"""Of its state, in the directory of the policy's."""


@dataclass
class _Sums:
    """Over the updates of a step."""

    loss: float = 0.0
    clipped: float = 0.0
    tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)
    stepped: int = 0


def make_critic(policy_path: Path, config: TrainerConfig, seed: int, total_steps: int) -> Critic | None:
    """The run's critic, if it has one."""
    return Critic(policy_path, config, seed, total_steps) if config.critic is not None else None


class Critic:
    """See ValueTrainer. `dtype` is for tests: it overrides what the configuration says."""

    def __init__(
        self, policy_path: Path, config: TrainerConfig, seed: int, total_steps: int, dtype: str | None = None
    ) -> None:
        if config.critic is None:
            raise ConfigError("there is no table [trainer.critic]")
        self._config = config.critic
        self._total_steps = total_steps
        self._budget = config.tokens_per_micro_batch
        compute = DTYPES[dtype or config.dtype]
        path = Path(self._config.model_path) if self._config.model_path else policy_path
        # What the critic draws must not change what the policy draws.
        with torch.random.fork_rng():
            self.model = ValueModel(path, compute, self._config.lora, seed, config.device)
        self.masters = Masters(self.model.trainable, compute, self._config.optimizer)
        self._swap = HostSwap(self.model.device, self._tensors)
        self._saving = BackgroundSave()

    def values(self, groups: Sequence[Group]) -> list[list[np.ndarray]]:
        """See ValueTrainer.values."""
        self.wake()
        result = token_zeros(groups)
        flat = [item for group in result for item in group]
        for batch, _ in self._batches(groups):
            with torch.no_grad():
                scatter_tokens(self.model.score(batch), batch.datum_index, batch.token_index, flat)
        return result

    def train(self, step: int, groups: Sequence[Group]) -> dict[str, float]:
        """See ValueTrainer.train. One mean over the trained tokens an update; nothing is done where there are none."""
        self.wake()
        rate = learning_rate(self._config.optimizer, step, self._total_steps)
        sums = _Sums()
        for _ in range(self._config.epochs):
            for part in cuts(len(groups), self._config.updates_per_epoch):
                self._update([groups[index] for index in part], rate, sums)
        found: dict[str, float] = {names.CRITIC_UPDATES: sums.stepped, names.CRITIC_LEARNING_RATE: rate}
        found |= explained_variance(groups)
        if sums.tokens:
            found[names.VALUE_LOSS] = sums.loss / sums.tokens
            found[names.VALUE_CLIP_FRACTION] = sums.clipped / sums.tokens
            finite = [norm for norm in sums.grad_norms if np.isfinite(norm)]
            if finite:
                found[names.CRITIC_GRAD_NORM] = float(np.mean(finite))
        return found

    def sleep(self) -> None:
        """Leave the device; see HostSwap."""
        if self.masters.pending:
            raise ValueError("the critic has a gradient that waits for a step, and cannot leave the device")
        self._swap.sleep()

    def wake(self) -> None:
        """Come back to the device."""
        self._swap.wake()

    @property
    def asleep(self) -> bool:
        """Whether it has left the device."""
        return self._swap.asleep

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        """Write masters, moments and progress into the folder `critic` of a directory."""
        self._saving.save(self.masters.state(), directory / FOLDER, optimizer, background)

    def finish_save(self) -> None:
        """Return when the last save is written; raise what went wrong."""
        self._saving.finish()

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """Take over what `save_state` wrote. FailedPrecondition when there is none."""
        if not (directory / FOLDER).is_dir():
            raise errors.FailedPrecondition(
                f"{directory} has no critic: it was saved without [trainer.critic]; start a new run, or leave it out"
            )
        self.masters.load_state(directory / FOLDER, optimizer)

    def _update(self, groups: Sequence[Group], rate: float, sums: _Sums) -> None:
        tokens = sum(int((datum.weights != 0).sum()) for group in groups for datum in group)
        if tokens == 0:
            return
        for batch, data in self._batches(groups):
            values = self.model.score(batch)
            before, returns = (
                gather_field(data, batch.datum_index, batch.token_index, name, values) for name in ("values", "returns")
            )
            found = clipped_value_loss(
                values, before, returns, torch.ones_like(values), self._config.value_clip or None
            )
            found.total.backward()
            sums.loss += float(found.total.detach())
            sums.clipped += float(found.metrics["value_clip_fraction"])
        done = self.masters.step(tokens, rate)
        sums.tokens += tokens
        sums.grad_norms.append(done.grad_norm)
        sums.stepped += int(done.stepped)

    def _batches(self, groups: Sequence[Group]) -> Iterable[tuple[PackedBatch, list[Datum]]]:
        """Micro-batches of whole groups, and the datums that their indices mean."""
        data = [datum for group in groups for datum in group]
        rows = []
        first = 0
        for group in groups:
            for datum in group:
                datum.check(self.model.vocabulary)
            if any(datum.weights.any() for datum in group):
                rows.append(rows_of(group, first, self.model.hidden_size, self.model.shares_prefixes))
            first += len(group)
        shapes = [(len(items), max(row.width for row in items)) for items in rows]
        for members in plan_micro_batches(shapes, self._budget):
            yield pack([row for index in members for row in rows[index]], data), data

    def _tensors(self) -> list[Tensor]:
        return [*self.model.tensors(), *self.masters.resident()]


def explained_variance(groups: Sequence[Sequence[Datum]]) -> dict[str, float]:
    """1 - var(return - value) / var(return) over the trained tokens, before the critic's update.

    Left out where the returns do not differ.
    """
    data = [datum for group in groups for datum in group if datum.values is not None and datum.returns is not None]
    values = np.concatenate([*(d.values[d.weights != 0] for d in data if d.values is not None), np.empty(0)])
    returns = np.concatenate([*(d.returns[d.weights != 0] for d in data if d.returns is not None), np.empty(0)])
    if returns.size < 2 or returns.max() == returns.min():
        return {}
    return {names.EXPLAINED_VARIANCE: float(1 - np.var(returns - values) / np.var(returns))}
