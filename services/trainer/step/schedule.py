"""The learning rate of a step: a pure function of the step, so that a resumed run needs no state for it."""

from __future__ import annotations

import math

from paceline.config.trainer import OptimizerConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int, skipped: int = 0) -> float:
    """Rate of step 1..total_steps: linear warm-up from learning_rate / warmup_steps, then the schedule down to
    min_learning_rate, which the last step has. The first `skipped` steps do not count: the schedule starts after them.
    """
    step, total_steps = step - skipped, total_steps - skipped
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    span = max(1, total_steps - max(1, config.warmup_steps))
    done = min(1.0, (step - max(1, config.warmup_steps)) / span)
    floor = min(config.min_learning_rate, config.learning_rate)
    share = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (config.learning_rate - floor) * share
