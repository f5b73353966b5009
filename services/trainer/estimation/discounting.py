"""Discounted sums from each token to the end, without a Python loop over tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

_CHUNK = 128


def discounted_sums(values: np.ndarray, factor: float) -> np.ndarray:
    """S with S_k = v_k + factor * S_{k+1}, float64 [n]. `factor` is in [0, 1].

    Within a chunk of 128 it is a product with the matrix factor^(j - i), j >= i; chunks are chained from the back.
    """
    if factor == 0.0 or values.size == 0:
        return values.astype(np.float64)
    if factor == 1.0:
        return np.cumsum(values[::-1], dtype=np.float64)[::-1].copy()
    result = np.empty(values.size)
    carry = 0.0
    for start in range((values.size - 1) // _CHUNK * _CHUNK, -1, -_CHUNK):
        block = values[start : start + _CHUNK]
        matrix, decay = _powers(factor)
        part = matrix[: block.size, : block.size] @ block + decay[_CHUNK - block.size :] * carry
        result[start : start + block.size] = part
        carry = part[0]
    return result


@lru_cache(maxsize=16)
def _powers(factor: float) -> tuple[np.ndarray, np.ndarray]:
    """factor^(j - i) where j >= i, else 0: [128, 128]; and factor^(128 - i): [128]."""
    ahead = np.arange(_CHUNK)[None, :] - np.arange(_CHUNK)[:, None]
    matrix = np.where(ahead >= 0, float(factor) ** np.maximum(ahead, 0), 0.0)
    return matrix, float(factor) ** (_CHUNK - np.arange(_CHUNK))
