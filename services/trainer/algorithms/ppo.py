"""PPO's advantages: what happened from a token on, against what the critic expected there (GAE)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import Field

from paceline.plugins import registry
from services.trainer.algorithms.base import TokenAdvantages, TrajectoryTokens
from services.trainer.estimation.discounting import discounted_sums
from services.trainer.estimation.rewards import OptionsWithoutKl, is_flat, reward_array
from services.trainer.estimation.whitening import whiten


@registry("estimator").register("ppo")
class Ppo:
    """d_k = r_k + gamma V_{k+1} - V_k; A_k = d_k + gamma lambda A_{k+1}; return_k = A_k + V_k; then A = whiten(A).

    Source: generalized advantage estimation, arXiv:1506.02438, eq. 16; PPO, arXiv:1707.06347, eq. 11. k counts the
    trained tokens of a trajectory over all of its samples; tokens between them (prompts, tool results) neither discount
    nor interrupt. r is 0 but at the last trained token, which has the reward. The value after it is 0, also where the
    token limit cut the trajectory. Whitening is over all trained tokens of the step and leaves the returns as they are.
    float64. A group of one has a gradient: the baseline is the critic's.
    """

    needs: frozenset[str] = frozenset({"values"})

    class Options(OptionsWithoutKl):
        """Options of the estimator."""

        gamma: float = Field(default=1.0, ge=0, le=1)
        """Discount of a token."""
        gae_lambda: float = Field(default=1.0, ge=0, le=1)
        """1 trusts what happened, 0 the critic's next value."""
        whiten: bool = True
        """Normalize advantages to mean 0 and standard deviation 1."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def token_advantages(self, groups: Sequence[Sequence[TrajectoryTokens]]) -> TokenAdvantages:
        """See TokenEstimator.token_advantages."""
        rewards = [reward_array([item.reward for item in group], number) for number, group in enumerate(groups)]
        values = [
            [self._advantages(item, reward) for item, reward in zip(group, known, strict=True)]
            for group, known in zip(groups, rewards, strict=True)
        ]
        returns = [
            [found + _values(item) for item, found in zip(group, part, strict=True)]
            for group, part in zip(groups, values, strict=True)
        ]
        if self._options.whiten:
            white = iter(whiten([item for part in values for item in part]))
            values = [[next(white) for _ in part] for part in values]
        return TokenAdvantages(
            values, returns, missing=sum(int(np.isnan(known).sum()) for known in rewards),
            zero_variance=[is_flat(known[~np.isnan(known)]) for known in rewards],
        )  # fmt: skip

    def _advantages(self, tokens: TrajectoryTokens, reward: float) -> np.ndarray:
        if np.isnan(reward) or tokens.num_tokens == 0:
            return np.full(tokens.num_tokens, np.nan)
        values = _values(tokens)
        steps = self._options.gamma * np.append(values[1:], 0.0) - values
        steps[-1] += reward
        return discounted_sums(steps, self._options.gamma * self._options.gae_lambda)


def _values(tokens: TrajectoryTokens) -> np.ndarray:
    if tokens.num_tokens == 0:
        return np.empty(0)
    if tokens.values is None:
        raise ValueError("the estimator 'ppo' needs the critic's values; is there a table [trainer.critic]?")
    return tokens.values.astype(np.float64)
