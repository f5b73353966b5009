"""The arithmetic of one training step: groups in, updated policy and numbers out. No network, no storage."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from paceline.config.trainer import TrainerConfig
from paceline.ids import GroupId
from paceline.samples import SampleGroup
from paceline.telemetry import names
from services.trainer.algorithms.base import Estimator, TokenEstimator
from services.trainer.backends.base import TrainBackend
from services.trainer.critic.base import ValueTrainer
from services.trainer.critic.residency import Residency
from services.trainer.datum import Datum
from services.trainer.estimation.estimate import estimate, give_rewards, needs_of
from services.trainer.objective import Objective
from services.trainer.step.data import StepGroup, cuts, weighted
from services.trainer.step.schedule import learning_rate
from services.trainer.step.summary import Phase, StepResult, Updates, describe, describe_rewards, logprob_gaps

__all__ = ["Phase", "StepResult", "StepTrainer"]

log = logging.getLogger(__name__)

T = TypeVar("T")


class StepTrainer:
    """Trains one step at a time. Called from the torch thread."""

    def __init__(
        self, backend: TrainBackend, estimator: Estimator | TokenEstimator, objective: Objective, config: TrainerConfig,
        total_steps: int, critic: ValueTrainer | None = None,
    ) -> None:  # fmt: skip
        self._backend = backend
        self._estimator = estimator
        self._objective = objective
        self._config = config
        self._total_steps = total_steps
        self._critic = critic
        self._rewarded = bool(getattr(objective.loss, "needs_rewards", True))
        self._residency = Residency(backend, critic, config.critic is not None and config.critic.offload)
        self._critic_only = config.critic.warmup_steps if config.critic is not None else 0

    def train(self, step: int, groups: Sequence[SampleGroup]) -> StepResult:
        """Train on the groups, in the order of their ids. Where nothing contributes the policy stays as it is."""
        ordered = sorted(groups, key=lambda group: GroupId.parse(group.group_id))
        found = [StepGroup.make(group, self._config.behaviour, self._rewarded) for group in ordered]
        result = StepResult(describe(found))
        updates = Updates()
        try:
            self._give_advantages(step, found, updates, result)
        finally:
            self._residency.turn_to_policy()
        frozen = step <= self._critic_only
        rate = 0.0 if frozen else learning_rate(self._config.optimizer, step, self._total_steps, self._critic_only)
        result.values[names.LEARNING_RATE] = rate
        if not frozen:
            self._train_policy(step, found, rate, updates, result)
        if updates.gaps is None and self._rewarded:
            self._measure(found, updates, result)
        result.values |= updates.values()
        self._add_times(result)
        return result

    def _give_advantages(self, step: int, groups: list[StepGroup], updates: Updates, result: StepResult) -> None:
        """Advantages of all datums; with a critic also their values and returns, towards which it is trained."""
        if not self._rewarded:
            give_rewards(groups)
            return
        needs = needs_of(self._estimator)
        scores = {}
        for name in sorted(needs - {"values"}):
            scores[name] = self._forward(groups, result, reference=name == "reference_logprobs")
        if "policy_logprobs" in scores:
            self._keep_policy(groups, scores["policy_logprobs"], updates)
        if "values" in needs:
            critic = self._require_critic()
            self._residency.turn_to_critic()
            scores["values"] = self._timed(
                names.SPAN_TRAINER_CRITIC, result, lambda: critic.values([group.datums for group in groups])
            )
            for number, group in enumerate(groups):
                group.give("values", group.collect(scores["values"][number]))
        result.values |= describe_rewards(groups, estimate(self._estimator, groups, scores))
        if "values" in needs:
            self._train_critic(step, groups, result)

    def _require_critic(self) -> ValueTrainer:
        if self._critic is None:
            raise ValueError("the estimator needs values, but there is no critic; add a table [trainer.critic]")
        return self._critic

    def _train_critic(self, step: int, groups: list[StepGroup], result: StepResult) -> None:
        critic = self._require_critic()
        data = [group.datums for group in groups if group.datums]
        if not data:
            return
        result.values |= self._timed(names.SPAN_TRAINER_CRITIC, result, lambda: critic.train(step, data))

    def _train_policy(
        self, step: int, groups: list[StepGroup], rate: float, updates: Updates, result: StepResult
    ) -> None:
        """All passes over the groups, each in as many updates as the configuration says."""
        parts = cuts(len(groups), self._config.updates_per_step)
        if self._config.behaviour == "policy" and len(parts) * self._config.epochs_per_step > 1:
            self._fix_behaviour(groups, updates, result)
        for _ in range(self._config.epochs_per_step):
            for part in parts:
                self._update(step, [groups[index] for index in part], rate, updates, result)

    def _update(
        self, step: int, groups: Sequence[StepGroup], rate: float, updates: Updates, result: StepResult
    ) -> None:
        """One optimizer update from the groups that contribute to it."""
        data, denominator = weighted(groups, self._config)
        contributing = [group for group in data if self._contributes(group)]
        if not contributing:
            return
        outcome = self._timed(
            names.SPAN_TRAINER_FORWARD_BACKWARD, result,
            lambda: self._backend.forward_backward(contributing, self._objective, self._objective.needs_reference),
        )  # fmt: skip
        done = self._timed(
            names.SPAN_TRAINER_OPTIMIZER, result, lambda: self._backend.optim_step(denominator, rate)
        )  # fmt: skip
        if not done.stepped:
            log.error("step %d: the gradient's norm is %s; the update is left out", step, done.grad_norm)
        updates.add(outcome, denominator, done)
        updates.trained |= {datum.name for group in contributing for datum in group if self._contributes([datum])}
        if updates.gaps is None and self._rewarded:
            updates.gaps = logprob_gaps(contributing, outcome.policy_logprobs)

    def _contributes(self, group: Sequence[Datum]) -> bool:
        """Whether its gradient can differ from zero. Skipping the others changes no sum."""
        needs_advantages = self._objective.needs_advantages
        return any(datum.weights.any() and (not needs_advantages or datum.advantages.any()) for datum in group)

    def _fix_behaviour(self, groups: list[StepGroup], updates: Updates, result: StepResult) -> None:
        """Behaviour log-probabilities of the groups that contribute: those before the step's first update."""
        chosen = [group for group in groups if self._contributes(group.datums)]
        if chosen and any(datum.behaviour_logprobs is None for group in chosen for datum in group.datums):
            self._keep_policy(chosen, self._forward(chosen, result), updates)

    def _keep_policy(self, groups: list[StepGroup], logprobs: list[list[np.ndarray]], updates: Updates) -> None:
        updates.gaps = logprob_gaps([group.datums for group in groups], logprobs) or None
        if self._config.behaviour == "policy":
            for group, values in zip(groups, logprobs, strict=True):
                group.give("behaviour_logprobs", group.collect(values))

    def _measure(self, groups: list[StepGroup], updates: Updates, result: StepResult) -> None:
        """Sampler against policy also where nothing was trained, so that a mismatch cannot hide."""
        if any(group.datums for group in groups):
            logprobs = self._forward(groups, result)
            updates.gaps = logprob_gaps([group.datums for group in groups], logprobs) or None

    def _forward(self, groups: list[StepGroup], result: StepResult, reference: bool = False) -> list[list[np.ndarray]]:
        """Log-probabilities for each group, an empty list for one without datums."""
        data = [group.datums for group in groups if group.datums]
        if not data:
            return [[] for _ in groups]
        found = iter(self._timed(
            names.SPAN_TRAINER_FORWARD_BACKWARD, result, lambda: self._backend.forward(data, reference)
        ))  # fmt: skip
        return [next(found) if group.datums else [] for group in groups]

    def _timed(self, name: str, result: StepResult, call: Callable[[], T]) -> T:
        began = time.time()
        found = call()
        result.phases.append(Phase(name, began, time.time()))
        return found

    def _add_times(self, result: StepResult) -> None:
        values = result.values
        forward = result.seconds(names.SPAN_TRAINER_FORWARD_BACKWARD)
        optimizer = result.seconds(names.SPAN_TRAINER_OPTIMIZER)
        values[names.SECONDS_FORWARD_BACKWARD], values[names.SECONDS_OPTIMIZER] = forward, optimizer
        if self._critic is not None:
            values[names.SECONDS_CRITIC] = result.seconds(names.SPAN_TRAINER_CRITIC)
        if forward + optimizer > 0:
            values[names.TRAIN_TOKENS_PER_SECOND] = values[names.TOKENS_TRAINED] / (forward + optimizer)
