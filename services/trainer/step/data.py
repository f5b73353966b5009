"""From the groups of a step to datums and back: which trained token belongs to which trajectory, and what it weighs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from paceline.config.trainer import TrainerConfig
from paceline.routing import NAME as ROUTING
from paceline.samples import SampleGroup
from services.trainer.datum import Datum
from services.trainer.step.aggregation import denominators
from services.trainer.step.trajectories import Trajectory, trajectories_of

TokenField = Literal["advantages", "values", "returns", "behaviour_logprobs", "reference_logprobs"]


@dataclass
class StepGroup:
    """One group of a step. `datums` hold what is trained: weights are 1 on sampled tokens, advantages 0 until given."""

    group_id: str
    trajectories: list[Trajectory]
    datums: list[Datum]
    owners: list[int]
    """For each datum the index of its trajectory."""

    @classmethod
    def make(cls, group: SampleGroup, behaviour: str = "sampler", rewarded: bool = True) -> StepGroup:
        """Datums for every sample with sampled tokens of the usable trajectories, in order."""
        found = cls(group.group_id, trajectories_of(group, rewarded), [], [])
        teacher = str(json.loads(group.metadata_json or "{}").get("teacher", ""))
        for number, item in enumerate(found.trajectories):
            for sample in item.samples if item.usable else ():
                if not sample.num_sampled:
                    continue
                found.datums.append(Datum(
                    token_ids=sample.token_ids, weights=sample.loss_mask.astype(np.float32),
                    advantages=np.zeros(len(sample.token_ids), np.float32), sampler_logprobs=sample.sampler_logprobs,
                    temperature=sample.temperature, name=f"sample {sample.sample_id}", teacher=teacher,
                    behaviour_logprobs=sample.sampler_logprobs if behaviour == "sampler" else None,
                    routing=sample.attached.get(ROUTING),
                ))  # fmt: skip
                found.owners.append(number)
        return found

    def usable_tokens(self) -> list[int]:
        """Trained tokens of each trajectory, 0 for one that is not usable."""
        return [item.num_tokens if item.usable else 0 for item in self.trajectories]

    def collect(self, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """From arrays [num_tokens] of each datum to float64 over the trained tokens of each trajectory, in order."""
        parts: list[list[np.ndarray]] = [[] for _ in self.trajectories]
        for datum, owner, values in zip(self.datums, self.owners, arrays, strict=True):
            parts[owner].append(values[datum.weights != 0].astype(np.float64))
        return [np.concatenate([*items, np.empty(0)]) for items in parts]

    def give(self, field: TokenField, tokens: Sequence[np.ndarray]) -> None:
        """The inverse of `collect`: set a field of the datums, float32, 0 where nothing is trained."""
        places = [0] * len(self.trajectories)
        for datum, owner in zip(self.datums, self.owners, strict=True):
            mask = datum.weights != 0
            start = places[owner]
            places[owner] = start + int(mask.sum())
            values = np.zeros(len(mask), np.float32)
            values[mask] = tokens[owner][start : places[owner]]
            setattr(datum, field, values)


def cuts(count: int, updates: int) -> list[list[int]]:
    """0..count-1 in order, in at most `updates` parts whose sizes differ by at most one, each index in one part."""
    return [[int(index) for index in part] for part in np.array_split(np.arange(count), max(1, min(updates, count)))]


def weighted(groups: Sequence[StepGroup], config: TrainerConfig) -> tuple[list[list[Datum]], float]:
    """The groups' datums with the weights of one update, and the update's denominator, counted over all of them."""
    counts = [count for group in groups for count in group.usable_tokens()]
    sums = denominators(counts, config.aggregation, config.aggregation_length)
    found, position = [], 0
    for group in groups:
        scale = sums.token_weights[position : position + len(group.trajectories)]
        position += len(group.trajectories)
        if group.datums:
            found.append([
                replace(datum, weights=(datum.weights * scale[owner]).astype(np.float32))
                for datum, owner in zip(group.datums, group.owners, strict=True)
            ])  # fmt: skip
    return found, sums.denominator
