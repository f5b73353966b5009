"""Metrics of losses as backends carry them: sums over tokens, and largest values. They become means only at the end."""

from __future__ import annotations

from collections.abc import Mapping

LARGEST = "_max"
"""Metrics whose name ends so are combined by max, all others by addition."""


def merge(total: dict[str, float], part: Mapping[str, float]) -> None:
    """Combine the metrics of one more micro-batch or rank into `total`."""
    for name, value in part.items():
        value = float(value)
        if name not in total:
            total[name] = value
        elif name.endswith(LARGEST):
            total[name] = max(total[name], value)
        else:
            total[name] += value
