"""Estimates of a KL divergence from log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

KlKind = Literal["k1", "k2", "k3", "low_variance", "unbiased"]


def kl_estimate(policy_logprobs: Tensor, base_logprobs: Tensor, kind: KlKind) -> Tensor:
    """Estimate KL(policy || base) on each token, for tokens drawn from the policy. Shape as the inputs.

    With x = policy - base: k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x. Source: J. Schulman, "Approximating KL
    Divergence", 2020. -x is clamped to +-20 in k3, as exp of more would swamp every other token.
    """
    x = policy_logprobs - base_logprobs
    if kind == "k1":
        return x
    if kind == "k2":
        return x.square() / 2
    negative = (-x).clamp(-20.0, 20.0)
    return negative.exp() - 1 - negative
