"""A group as trajectories: the unit that has a reward, whatever number of samples it was cut into."""

from __future__ import annotations

import math
from dataclasses import dataclass

from paceline.samples import FAILED, InvalidSample, Sample, SampleGroup


@dataclass
class Trajectory:
    """One episode of a group: its samples share a reward."""

    samples: list[Sample]
    reward: float | None
    usable: bool
    """It has tokens to train on and, where the loss needs one, a reward."""
    num_tokens: int
    """Sampled tokens of all its samples."""


def trajectories_of(group: SampleGroup, rewarded: bool = True) -> list[Trajectory]:
    """The episodes of a group in order. `rewarded`: one without a reward is not usable.

    InvalidSample when samples of one episode disagree on its reward, or the reward is not finite.
    """
    by_id: dict[str, list[Sample]] = {}
    for sample in group.samples:
        by_id.setdefault(sample.trajectory_id or sample.sample_id, []).append(sample)
    found = []
    for name, samples in by_id.items():
        rewards = {sample.reward_value for sample in samples}
        if any(value is not None and not math.isfinite(value) for value in rewards):
            raise InvalidSample(
                f"INVALID_REWARD: group {group.group_id}: trajectory {name} has the reward {rewards}; grade it as "
                "missing instead"
            )
        if len(rewards) > 1:
            raise InvalidSample(
                f"group {group.group_id}: samples of trajectory {name} have different rewards {rewards}"
            )
        reward = samples[0].reward_value
        tokens = sum(sample.num_sampled for sample in samples)
        failed = any(sample.status == FAILED for sample in samples)
        usable = tokens > 0 and not failed and (reward is not None or not rewarded)
        found.append(Trajectory(samples, reward, usable, tokens))
    return found
