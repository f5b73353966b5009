"""A reward of one's own: partial credit for sorting, computed from the prompt alone, so the data needs no label."""

from __future__ import annotations

from paceline.environment import reward


@reward
def sortedness(prompt: str, response: str) -> float:
    """Share of places that hold the letter they should: "bca=" answered by "abb" is worth 2/3."""
    wanted = sorted(prompt.rstrip("="))
    given = response.strip()[: len(wanted)]
    return sum(a == b for a, b in zip(wanted, given, strict=False)) / len(wanted)
