"""One token sequence with what its loss needs: what backends take, from the loop and from the service alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class InvalidDatum(ValueError):
    """A datum does not hold together; the text names the datum, the field and the value."""


@dataclass
class Datum:
    """All arrays have shape [num_tokens]; entry t belongs to token t, predicted from the tokens before it."""

    token_ids: np.ndarray
    """int32"""
    weights: np.ndarray
    """float32, 0 where the token has no loss; entry 0 must be 0, as nothing predicts the first token"""
    advantages: np.ndarray
    """float32"""
    sampler_logprobs: np.ndarray
    """float32"""
    temperature: float = 1.0
    """Divides the logits."""
    behaviour_logprobs: np.ndarray | None = None
    """float32; None means the policy itself, as it is at the pass (ratio 1)"""
    name: str = ""
    """For messages."""

    def check(self, vocabulary: int) -> None:
        """InvalidDatum unless lengths, ids, weights and temperature are usable with a vocabulary of that size."""
        count = len(self.token_ids)
        if count < 1:
            raise InvalidDatum(f"{self.name}: token_ids is empty")
        for field in ("weights", "advantages", "sampler_logprobs", "behaviour_logprobs"):
            values = getattr(self, field)
            if values is None:
                continue
            if values.shape != (count,):
                raise InvalidDatum(
                    f"{self.name}: {field} has shape {list(values.shape)}, token_ids has {count} entries"
                )
            if not np.isfinite(values).all():
                raise InvalidDatum(f"{self.name}: {field} holds a value that is not finite")
        low, high = int(self.token_ids.min()), int(self.token_ids.max())
        if low < 0 or high >= vocabulary:
            raise InvalidDatum(
                f"{self.name}: token id {low if low < 0 else high} is outside the vocabulary of {vocabulary}"
            )
        if self.weights[0] != 0:
            raise InvalidDatum(
                f"{self.name}: weights[0] is {self.weights[0]}; the first token is predicted from nothing"
            )
        if not (self.temperature > 0 and np.isfinite(self.temperature)):
            raise InvalidDatum(f"{self.name}: temperature {self.temperature} must be positive and finite")


Group = Sequence[Datum]
"""Datums that are kept in one micro-batch and may share a prefix."""
