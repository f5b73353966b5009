"""How token losses become one number: a weight for each sequence's tokens and one explicit denominator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from paceline.config.trainer import Aggregation


@dataclass(frozen=True)
class Denominators:
    """What token losses are multiplied with, and what their sum is divided by."""

    token_weights: np.ndarray
    """float64 [num_sequences]: weight of each token of the sequence."""
    denominator: float
    """Divides the sum over all micro-batches; 0 when no token counts."""


def denominators(num_tokens: Sequence[int], aggregation: Aggregation, length: int | None = None) -> Denominators:
    """Weights and denominator for sequences (trajectories) with `num_tokens` trained tokens each.

    token_mean: sum over all tokens / number of tokens (DAPO, arXiv:2503.14476, section 3.3).
    seq_mean_token_mean: mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300, eq. 3).
    seq_mean_token_sum: mean over sequences of the sum over tokens.
    constant: sum over all tokens / (number of sequences * length), for a `length` that is the same in every update
    (Dr. GRPO, arXiv:2503.20783, section 3.2). ValueError when it is missing.
    Sequences without a token count in no denominator. All are over the whole update, so a gradient does not depend on
    how the update is cut into micro-batches.
    """
    counts = np.asarray(num_tokens, dtype=np.float64)
    sequences = float((counts > 0).sum())
    if aggregation == "token_mean":
        return Denominators(np.ones_like(counts), float(counts.sum()))
    if aggregation == "seq_mean_token_sum":
        return Denominators(np.ones_like(counts), sequences)
    if aggregation == "constant":
        if length is None:
            raise ValueError("aggregation 'constant' needs the length that it divides by")
        return Denominators(np.ones_like(counts), sequences * length)
    return Denominators(np.divide(1.0, counts, out=np.zeros_like(counts), where=counts > 0), sequences)
