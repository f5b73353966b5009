"""What an evaluation says in numbers. A missing reward counts as missing, never as wrong."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.samples import Sample
from paceline.telemetry import names

_TOLERANCE = 1e-6


def summarize(prompts: Sequence[Sequence[Sample]], samples_per_prompt: int, full_marks: float) -> dict[str, float]:
    """Metrics by name over the samples of every prompt; a prompt that failed has no samples.

    A sample passes when its reward reaches `full_marks`. pass_at_1 is the share of graded samples that pass, pass_at_k
    whether any does, both averaged over the prompts with at least one reward. Values that nothing was measured for are
    left out.
    """
    samples = [sample for group in prompts for sample in group]
    rewards = [_rewards(group) for group in prompts]
    flat = [value for values in rewards for value in values]
    found = {
        names.EVALUATION_PROMPTS: float(len(prompts)),
        names.REWARD_MISSING: float(len(prompts) * samples_per_prompt - len(flat)),
    }
    if samples:
        found[names.RESPONSE_LENGTH_MEAN] = float(np.mean([sample.num_sampled for sample in samples]))
    if flat:
        passed = [[value >= full_marks - _TOLERANCE for value in values] for values in rewards if values]
        found[names.REWARD_MEAN] = float(np.mean(flat))
        found[names.REWARD_STD] = float(np.std(flat))
        found[names.PASS_AT_1] = float(np.mean([np.mean(marks) for marks in passed]))
        found[names.PASS_AT_K] = float(np.mean([any(marks) for marks in passed]))
    return found


def _rewards(samples: Sequence[Sample]) -> list[float]:
    return [value for sample in samples if (value := sample.reward_value) is not None]
