"""The arithmetic of one training step: groups in, updated policy and numbers out. No network, no storage."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.config.trainer import TrainerConfig
from paceline.ids import GroupId
from paceline.samples import FAILED, TRUNCATED, InvalidSample, Sample, SampleGroup
from paceline.telemetry import names
from services.trainer.aggregation import denominators
from services.trainer.algorithms.base import Estimator
from services.trainer.backends.base import PassResult, TrainBackend
from services.trainer.datum import Datum
from services.trainer.losses.base import RATIO_CLAMP
from services.trainer.objective import Objective
from services.trainer.schedule import learning_rate

log = logging.getLogger(__name__)


@dataclass
class Phase:
    """When a part of the step ran, in Unix seconds."""

    name: str
    start: float
    end: float


@dataclass
class StepResult:
    """Outcome of a step: values by the names of paceline.telemetry.names, and when its parts ran."""

    values: dict[str, float]
    phases: list[Phase] = field(default_factory=list)

    def seconds(self, name: str) -> float:
        """Time spent in the phases of that name."""
        return sum(item.end - item.start for item in self.phases if item.name == name)


@dataclass
class _Trajectory:
    """One episode of a group: its samples share a reward."""

    samples: list[Sample]
    reward: float | None
    usable: bool
    """It has a reward, and tokens to train on."""
    num_tokens: int


class StepTrainer:
    """Trains one step at a time. Called from the torch thread."""

    def __init__(
        self, backend: TrainBackend, estimator: Estimator, objective: Objective, config: TrainerConfig, total_steps: int
    ) -> None:
        self._backend = backend
        self._estimator = estimator
        self._objective = objective
        self._config = config
        self._total_steps = total_steps

    def train(self, step: int, groups: Sequence[SampleGroup]) -> StepResult:
        """Train on the groups, in the order of their ids. Where nothing contributes the policy stays as it is."""
        ordered = sorted(groups, key=lambda group: GroupId.parse(group.group_id))
        episodes = [_trajectories(group) for group in ordered]
        rewards = [[item.reward if item.usable else None for item in group] for group in episodes]
        estimate = self._estimator.advantages(rewards)
        result = StepResult(_describe(ordered, episodes, estimate.zero_variance))
        rate = learning_rate(self._config.optimizer, step, self._total_steps)
        result.values[names.LEARNING_RATE] = rate
        updates = _Updates()
        policy = self._policy_first(episodes, estimate.values, updates, result)
        cuts = np.array_split(np.arange(len(ordered)), min(self._config.updates_per_step, len(ordered)))
        for cut in cuts:
            chosen = [index for index in cut if index < len(ordered)]
            data, denominator, keys = self._data(episodes, estimate.values, chosen)
            if policy is not None:
                _give_behaviour(data, policy, keys)
            self._update(step, data, denominator, rate, updates, result)
        if updates.gaps is None:
            self._measure_only(episodes, estimate.values, updates, result)
        self._summarize(updates, result)
        return result

    def _update(
        self, step: int, data: list[list[Datum]], denominator: float, rate: float, updates: _Updates, result: StepResult
    ) -> None:
        """One optimizer update from the groups that contribute to it."""
        contributing = [group for group in data if self._contributes(group)]
        if not contributing:
            return
        began = time.time()
        outcome = self._backend.forward_backward(contributing, self._objective, self._objective.needs_reference)
        middle = time.time()
        done = self._backend.optim_step(denominator, rate)
        result.phases.append(Phase(names.SPAN_TRAINER_FORWARD_BACKWARD, began, middle))
        result.phases.append(Phase(names.SPAN_TRAINER_OPTIMIZER, middle, time.time()))
        if not done.stepped:
            log.error("step %d: the gradient's norm is %s; the update is left out", step, done.grad_norm)
        updates.add(outcome, denominator, done.grad_norm, done.stepped)
        updates.samples += sum(_has_gradient(datum) for group in contributing for datum in group)
        if updates.gaps is None:
            updates.gaps = _gaps(contributing, outcome.policy_logprobs)

    def _contributes(self, group: list[Datum]) -> bool:
        """Whether its gradient can differ from zero. Skipping the others changes no sum."""
        if self._objective.needs_reference:
            return any(datum.weights.any() for datum in group)
        return any(_has_gradient(datum) for datum in group)

    def _data(
        self, episodes: list[list[_Trajectory]], advantages: list[np.ndarray], chosen: Sequence[int]
    ) -> tuple[list[list[Datum]], float, list[list[str]]]:
        """Datums of the chosen groups, the denominator of their update, and the sample ids."""
        counts = [item.num_tokens if item.usable else 0 for index in chosen for item in episodes[index]]
        sums = denominators(counts, self._config.aggregation)
        data, keys, position = [], [], 0
        for index in chosen:
            group, ids = [], []
            for number, item in enumerate(episodes[index]):
                weight = sums.token_weights[position]
                position += 1
                if not item.usable:
                    continue
                advantage = float(advantages[index][number])
                for sample in item.samples:
                    if sample.num_sampled:
                        group.append(self._datum(sample, weight, advantage))
                        ids.append(sample.sample_id)
            if group:
                data.append(group)
                keys.append(ids)
        return data, sums.denominator, keys

    def _datum(self, sample: Sample, weight: float, advantage: float) -> Datum:
        behaviour = sample.sampler_logprobs if self._config.behaviour == "sampler" else None
        return Datum(
            token_ids=sample.token_ids, weights=(sample.loss_mask * weight).astype(np.float32),
            advantages=np.full(len(sample.token_ids), advantage, np.float32), sampler_logprobs=sample.sampler_logprobs,
            temperature=sample.temperature, behaviour_logprobs=behaviour, name=f"sample {sample.sample_id}",
        )  # fmt: skip

    def _policy_first(
        self, episodes: list[list[_Trajectory]], advantages: list[np.ndarray], updates: _Updates, result: StepResult
    ) -> dict[str, np.ndarray] | None:
        """Log-probabilities before the first update by sample id, where later updates need them as behaviour."""
        if self._config.behaviour != "policy" or self._config.updates_per_step == 1:
            return None
        data, _, keys = self._data(episodes, advantages, range(len(episodes)))
        pairs = [(group, ids) for group, ids in zip(data, keys, strict=True) if self._contributes(group)]
        if not pairs:
            return {}
        began = time.time()
        logprobs = self._backend.forward([group for group, _ in pairs])
        result.phases.append(Phase(names.SPAN_TRAINER_FORWARD_BACKWARD, began, time.time()))
        updates.gaps = _gaps([group for group, _ in pairs], logprobs)
        found: dict[str, np.ndarray] = {}
        for (_, ids), values in zip(pairs, logprobs, strict=True):
            found.update(zip(ids, values, strict=True))
        return found

    def _measure_only(
        self, episodes: list[list[_Trajectory]], advantages: list[np.ndarray], updates: _Updates, result: StepResult
    ) -> None:
        """Sampler against policy also where nothing was trained, so that a mismatch cannot hide."""
        data, _, _ = self._data(episodes, advantages, range(len(episodes)))
        if not data:
            return
        began = time.time()
        updates.gaps = _gaps(data, self._backend.forward(data))
        result.phases.append(Phase(names.SPAN_TRAINER_FORWARD_BACKWARD, began, time.time()))

    def _summarize(self, updates: _Updates, result: StepResult) -> None:
        values = result.values
        values[names.OPTIMIZER_UPDATES] = updates.stepped
        values[names.SAMPLES_TRAINED] = updates.samples
        values.update(updates.means())
        if updates.gaps is not None:
            values.update(updates.gaps)
        forward = result.seconds(names.SPAN_TRAINER_FORWARD_BACKWARD)
        optimizer = result.seconds(names.SPAN_TRAINER_OPTIMIZER)
        values[names.SECONDS_FORWARD_BACKWARD], values[names.SECONDS_OPTIMIZER] = forward, optimizer
        if forward + optimizer > 0:
            values[names.TRAIN_TOKENS_PER_SECOND] = values[names.TOKENS_TRAINED] / (forward + optimizer)


@dataclass
class _Updates:
    """Sums over the optimizer updates of a step."""

    losses: list[float] = field(default_factory=list)
    policy_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    token_sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    stepped: int = 0
    samples: int = 0
    gaps: dict[str, float] | None = None

    def add(self, outcome: PassResult, denominator: float, grad_norm: float, stepped: bool) -> None:
        self.losses.append(outcome.loss_sum / denominator)
        self.policy_losses.append(outcome.metrics.pop("policy_loss", outcome.loss_sum) / denominator)
        self.grad_norms.append(grad_norm)
        self.tokens += outcome.num_tokens
        self.stepped += int(stepped)
        for name, value in outcome.metrics.items():
            self.token_sums[name] = self.token_sums.get(name, 0.0) + value

    def means(self) -> dict[str, float]:
        """Means over updates or tokens. Without an update the losses are 0, and what was not measured is left out."""
        found = {names.LOSS: 0.0, names.POLICY_LOSS: 0.0}
        if self.losses:
            found = {names.LOSS: float(np.mean(self.losses)), names.POLICY_LOSS: float(np.mean(self.policy_losses))}
            found[names.GRAD_NORM] = float(np.mean(self.grad_norms))
        if self.tokens:
            renamed = {"entropy_sum": names.ENTROPY}
            known = {names.ENTROPY, names.CLIP_FRACTION, names.KL_REFERENCE}
            for name, value in self.token_sums.items():
                if renamed.get(name, name) in known:
                    found[renamed.get(name, name)] = value / self.tokens
        return {name: value for name, value in found.items() if math.isfinite(value)}


def _trajectories(group: SampleGroup) -> list[_Trajectory]:
    """The episodes of a group in order. InvalidSample when samples of one episode disagree on its reward."""
    by_id: dict[str, list[Sample]] = {}
    for sample in group.samples:
        by_id.setdefault(sample.trajectory_id or sample.sample_id, []).append(sample)
    found = []
    for name, samples in by_id.items():
        rewards = {sample.reward_value for sample in samples}
        if len(rewards) > 1:
            raise InvalidSample(
                f"group {group.group_id}: samples of trajectory {name} have different rewards {rewards}"
            )
        reward = samples[0].reward_value
        tokens = sum(sample.num_sampled for sample in samples)
        failed = any(sample.status == FAILED for sample in samples)
        found.append(_Trajectory(samples, reward, reward is not None and tokens > 0 and not failed, tokens))
    return found


def _describe(
    groups: Sequence[SampleGroup], episodes: list[list[_Trajectory]], zero_variance: list[bool]
) -> dict[str, float]:
    """What the step's groups are like, before any training."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = [item.reward for group in episodes for item in group if item.reward is not None]
    lengths = [sample.num_sampled for sample in samples]
    unrewarded = [all(item.reward is None for item in group) for group in episodes]
    values: dict[str, float] = {
        names.REWARD_MISSING: sum(item.reward is None for group in episodes for item in group),
        names.GROUPS_TRAINED: len(groups),
        names.GROUPS_ZERO_VARIANCE: sum(
            flat and not without for flat, without in zip(zero_variance, unrewarded, strict=True)
        ),
        names.GROUPS_WITHOUT_REWARD: sum(unrewarded),
        names.TRUNCATED_FRACTION: float(np.mean([sample.status == TRUNCATED for sample in samples])),
        names.TOKENS_TRAINED: sum(lengths),
        names.RESPONSE_LENGTH_MEAN: float(np.mean(lengths)),
    }
    if rewards:
        values[names.REWARD_MEAN] = float(np.mean(rewards))
        values[names.REWARD_STD] = float(np.std(rewards))
    return values


def _has_gradient(datum: Datum) -> bool:
    return bool(datum.weights.any()) and bool(datum.advantages.any())


def _give_behaviour(data: list[list[Datum]], policy: dict[str, np.ndarray], keys: list[list[str]]) -> None:
    for group, ids in zip(data, keys, strict=True):
        for datum, sample_id in zip(group, ids, strict=True):
            # A group that cannot contribute was not scored, and its datums are not used.
            datum.behaviour_logprobs = policy.get(sample_id)


def _gaps(groups: Sequence[Sequence[Datum]], policy: list[list[np.ndarray]]) -> dict[str, float]:
    """How far sampler and policy are apart, over the trained tokens.

    sampler_kl is the k3 estimate of KL(sampler || policy); effective_sample_size is (sum w)^2 / (n sum w^2).
    """
    differences = [
        (values.astype(np.float64) - datum.sampler_logprobs)[datum.weights != 0]
        for group, items in zip(groups, policy, strict=True)
        for datum, values in zip(group, items, strict=True)
    ]
    gap = np.concatenate(differences)
    weights = np.exp(np.clip(gap, -RATIO_CLAMP, RATIO_CLAMP))
    return {
        names.LOGPROB_GAP_MEAN: float(np.abs(gap).mean()),
        names.LOGPROB_GAP_MAX: float(np.abs(gap).max()),
        names.SAMPLER_KL: float((weights - 1 - np.clip(gap, -RATIO_CLAMP, RATIO_CLAMP)).mean()),
        names.EFFECTIVE_SAMPLE_SIZE: float(weights.sum() ** 2 / (gap.size * np.square(weights).sum())),
    }
