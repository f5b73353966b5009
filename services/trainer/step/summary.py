"""The numbers of a step: what its groups are like, what its updates came to, how far sampler and policy are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from paceline.samples import TRUNCATED
from paceline.telemetry import names
from services.trainer.backends.base import PassResult, StepOutcome
from services.trainer.datum import Datum
from services.trainer.loss_metrics import LARGEST, merge
from services.trainer.losses.base import RATIO_CLAMP
from services.trainer.step.data import StepGroup


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
class Updates:
    """Sums over the optimizer updates of a step."""

    losses: list[float] = field(default_factory=list)
    policy_losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    sums: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    stepped: int = 0
    trained: set[str] = field(default_factory=set)
    """Names of the datums that had a gradient."""
    gaps: dict[str, float] | None = None

    def add(self, outcome: PassResult, denominator: float, done: StepOutcome) -> None:
        """Take in one update."""
        metrics = dict(outcome.metrics)
        self.losses.append(outcome.loss_sum / denominator)
        self.policy_losses.append(metrics.pop("policy_loss", outcome.loss_sum) / denominator)
        self.grad_norms.append(done.grad_norm)
        self.tokens += outcome.num_tokens
        self.stepped += int(done.stepped)
        merge(self.sums, metrics)

    def values(self) -> dict[str, float]:
        """Means over updates or tokens. Without an update the losses are 0, and what was not measured is left out."""
        found = {names.LOSS: 0.0, names.POLICY_LOSS: 0.0}
        if self.losses:
            found = {names.LOSS: float(np.mean(self.losses)), names.POLICY_LOSS: float(np.mean(self.policy_losses))}
            found[names.GRAD_NORM] = float(np.mean(self.grad_norms))
        for name, value in self.sums.items():
            key = names.ENTROPY if name == "entropy_sum" else name
            if key in names.UNITS and self.tokens:
                found[key] = value if name.endswith(LARGEST) else value / self.tokens
        found |= self._preferences() | self._correction_size() | self._disagreement()
        found |= {names.OPTIMIZER_UPDATES: self.stepped, names.SAMPLES_TRAINED: len(self.trained), **(self.gaps or {})}
        return {name: value for name, value in found.items() if math.isfinite(value)}

    def _preferences(self) -> dict[str, float]:
        """Means over the pairs of a preference loss."""
        pairs = self.sums.get("preference_pairs", 0.0)
        keys = ((names.PREFERENCE_ACCURACY, "preference_correct"), (names.PREFERENCE_MARGIN, "preference_margin"))
        return {name: self.sums[key] / pairs for name, key in keys} if pairs else {}

    def _disagreement(self) -> dict[str, float]:
        """How often replayed routing is not what the trainer's routers would do."""
        choices = self.sums.get("routing_choices", 0.0)
        return {names.ROUTING_DISAGREEMENT: self.sums["routing_differing"] / choices} if choices else {}

    def _correction_size(self) -> dict[str, float]:
        """Effective sample size of the corrections' weights, as a share of the tokens."""
        total, squares = self.sums.get("correction_weight_mean", 0.0), self.sums.get("correction_weight_square", 0.0)
        return {names.CORRECTION_SAMPLE_SIZE: total**2 / (self.tokens * squares)} if squares and self.tokens else {}


def describe(groups: Sequence[StepGroup]) -> dict[str, float]:
    """What the step's groups are like, before any training."""
    samples = [sample for group in groups for item in group.trajectories for sample in item.samples]
    lengths = [sample.num_sampled for sample in samples]
    return {
        names.GROUPS_TRAINED: len(groups),
        names.TRUNCATED_FRACTION: float(np.mean([sample.status == TRUNCATED for sample in samples])),
        names.TOKENS_TRAINED: sum(lengths),
        names.RESPONSE_LENGTH_MEAN: float(np.mean(lengths)),
    }


def describe_rewards(groups: Sequence[StepGroup], zero_variance: Sequence[bool]) -> dict[str, float]:
    """What the rewards are like. A group without any is counted apart from those whose rewards are equal."""
    trajectories = [item for group in groups for item in group.trajectories]
    rewards = [item.reward for item in trajectories if item.reward is not None]
    unrewarded = [all(item.reward is None for item in group.trajectories) for group in groups]
    values: dict[str, float] = {
        names.REWARD_MISSING: sum(item.reward is None for item in trajectories),
        names.GROUPS_ZERO_VARIANCE: sum(
            flat and not without for flat, without in zip(zero_variance, unrewarded, strict=True)
        ),
        names.GROUPS_WITHOUT_REWARD: sum(unrewarded),
    }
    if rewards:
        values[names.REWARD_MEAN] = float(np.mean(rewards))
        values[names.REWARD_STD] = float(np.std(rewards))
    return values


def logprob_gaps(groups: Sequence[Sequence[Datum]], policy: Sequence[Sequence[np.ndarray]]) -> dict[str, float]:
    """How far sampler and policy are apart, over the trained tokens.

    sampler_kl is the k3 estimate of KL(sampler || policy); effective_sample_size is (sum w)^2 / (n sum w^2).
    """
    differences = [
        (values.astype(np.float64) - datum.sampler_logprobs)[datum.weights != 0]
        for group, items in zip(groups, policy, strict=True)
        for datum, values in zip(group, items, strict=True)
    ]
    gap = np.concatenate([*differences, np.empty(0)])
    if gap.size == 0:
        return {}
    weights = np.exp(np.clip(gap, -RATIO_CLAMP, RATIO_CLAMP))
    return {
        names.LOGPROB_GAP_MEAN: float(np.abs(gap).mean()),
        names.LOGPROB_GAP_MAX: float(np.abs(gap).max()),
        names.SAMPLER_KL: float((weights - 1 - np.clip(gap, -RATIO_CLAMP, RATIO_CLAMP)).mean()),
        names.EFFECTIVE_SAMPLE_SIZE: float(weights.sum() ** 2 / (gap.size * np.square(weights).sum())),
    }
