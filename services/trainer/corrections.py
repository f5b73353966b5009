"""Weights for the gap between the engine that sampled and the policy that is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.trainer.losses.base import RATIO_CLAMP

if TYPE_CHECKING:
    from torch import Tensor


def truncated_importance_weights(behaviour_logprobs: Tensor, sampler_logprobs: Tensor, clip: float) -> Tensor:
    """min(exp(behaviour - sampler), clip) on each token, without a gradient. Shape as the inputs.

    Behaviour is the policy before the step's first update. Source: Yao et al., "Your Efficient RL Framework Secretly
    Brings You Off-Policy RL Training", 2025 (truncated importance sampling); Ionides 2008 for the truncation.
    """
    difference = (behaviour_logprobs - sampler_logprobs).detach().clamp(-RATIO_CLAMP, RATIO_CLAMP)
    return difference.exp().clamp(max=clip)
