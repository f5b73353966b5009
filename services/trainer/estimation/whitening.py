"""Mean 0 and standard deviation 1 over a whole step, in float64 and without a difference of large squares."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPSILON = 1e-8
"""Added to the variance."""


def whiten(values: Sequence[np.ndarray]) -> list[np.ndarray]:
    """(v - mean) / sqrt(variance + 1e-8), statistics over all entries, NaN left out.

    The variance is unbiased (n - 1). Fewer than two entries, or equal ones, carry no signal: all become exact zeros.
    """
    source = np.concatenate([*values, np.empty(0)])
    known = source[~np.isnan(source)]
    if known.size < 2 or known.max() == known.min():
        return [np.where(np.isnan(item), np.nan, 0.0) for item in values]
    mean = known.mean()
    scale = np.sqrt(np.square(known - mean).sum() / (known.size - 1) + EPSILON)
    return [(item - mean) / scale for item in values]
