"""Estimates of a KL divergence from log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.config.trainer import KlKind

if TYPE_CHECKING:
    from torch import Tensor

_LARGEST = 20.0
_LARGEST_ESTIMATE = 10.0


def kl_estimate(
    policy_logprobs: Tensor, base_logprobs: Tensor, kind: KlKind, behaviour_logprobs: Tensor | None = None
) -> Tensor:
    """Estimate KL(policy || base) on each token, for tokens drawn from the policy. Shape as the inputs.

    With x = policy - base: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x (J. Schulman, "Approximating KL Divergence",
    2020), low_variance = k3 moved into [-10, 10]. -x is clamped to +-20 in exp, as more would swamp every other token.
    unbiased = exp(policy - behaviour) k3, for tokens drawn from the behaviour (DeepSeek-V3.2, arXiv:2512.02556,
    section 3.1); behaviour_logprobs None stands for the policy, detached.

    As a loss, only k2 (on tokens of the policy itself) and unbiased have the expected gradient of the KL; k1 has none,
    and k3 that of KL(base || policy).
    """
    x = policy_logprobs - base_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    negative = (-x).clamp(-_LARGEST, _LARGEST)
    estimate = negative.exp() - 1 - negative
    if kind == "low_variance":
        return estimate.clamp(-_LARGEST_ESTIMATE, _LARGEST_ESTIMATE)
    if kind == "unbiased":
        behaviour = policy_logprobs.detach() if behaviour_logprobs is None else behaviour_logprobs
        return (policy_logprobs - behaviour).clamp(-_LARGEST, _LARGEST).exp() * estimate
    return estimate
