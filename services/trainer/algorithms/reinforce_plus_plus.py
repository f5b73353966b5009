"""REINFORCE++: returns of tokens with the KL to the reference in the reward, normalized over the whole step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.algorithms.base import TokenAdvantages, TrajectoryTokens
from services.trainer.estimation.discounting import discounted_sums
from services.trainer.estimation.rewards import is_flat, reward_array
from services.trainer.estimation.whitening import whiten


@registry("estimator").register("reinforce_plus_plus")
class ReinforcePlusPlus:
    """r_t = -kl_coefficient kl_t, plus R at the last trained token; G_t = r_t + gamma G_{t+1}; A = whiten(G).

    Source: REINFORCE++, arXiv:2501.03262. kl_t compares the policy before the step's first update with the reference:
    k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x, x = policy - reference. Discounting counts trained tokens only. The
    mean and the standard deviation are those of all trained tokens of the step, in float64; returns that are all equal
    become exact zeros. There is no group baseline, so a group of one, or of equal rewards, has a gradient.
    """

    class Options(StrictModel):
        """Options of the estimator."""

        gamma: float = Field(default=1.0, ge=0, le=1)
        """Discount of a token."""
        kl_coefficient: float = Field(default=0.0, ge=0)
        """Weight of the KL in the reward; above 0 a reference is loaded."""
        kl_kind: Literal["k1", "k2", "k3"] = "k1"
        """How a token's KL is estimated."""

    def __init__(self, options: Options) -> None:
        self._options = options
        both = {"policy_logprobs", "reference_logprobs"}
        self.needs = frozenset(both if options.kl_coefficient > 0 else ())

    def token_advantages(self, groups: Sequence[Sequence[TrajectoryTokens]]) -> TokenAdvantages:
        """See TokenEstimator.token_advantages."""
        rewards = [reward_array([item.reward for item in group], number) for number, group in enumerate(groups)]
        returns = [
            [self._returns(item, reward) for item, reward in zip(group, values, strict=True)]
            for group, values in zip(groups, rewards, strict=True)
        ]
        white = iter(whiten([item for group in returns for item in group]))
        return TokenAdvantages(
            values=[[next(white) for _ in group] for group in groups],
            missing=sum(int(np.isnan(values).sum()) for values in rewards),
            zero_variance=[is_flat(values[~np.isnan(values)]) for values in rewards],
        )

    def _returns(self, tokens: TrajectoryTokens, reward: float) -> np.ndarray:
        if np.isnan(reward) or tokens.num_tokens == 0:
            return np.full(tokens.num_tokens, np.nan)
        rewards = np.zeros(tokens.num_tokens)
        if self._options.kl_coefficient > 0:
            rewards -= self._options.kl_coefficient * self._kl(tokens)
        rewards[-1] += reward
        return discounted_sums(rewards, self._options.gamma)

    def _kl(self, tokens: TrajectoryTokens) -> np.ndarray:
        assert tokens.policy_logprobs is not None and tokens.reference_logprobs is not None
        x = tokens.policy_logprobs - tokens.reference_logprobs
        if self._options.kl_kind == "k1":
            return x
        return x * x / 2 if self._options.kl_kind == "k2" else np.exp(np.clip(-x, -20.0, 20.0)) - 1 + x
