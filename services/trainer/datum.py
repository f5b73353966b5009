"""One token sequence with what its loss needs: what backends take, from the loop and from the service alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_ARRAYS = (
    "weights", "advantages", "sampler_logprobs", "behaviour_logprobs", "reference_logprobs", "values", "returns",
    "teacher_logprobs",
)  # fmt: skip


class InvalidDatum(ValueError):
    """A datum does not hold together; the text names the datum, the field and the value."""


@dataclass
class Datum:
    """Arrays are [num_tokens] where nothing else is said; entry t belongs to token t, predicted from those before."""

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
    reference_logprobs: np.ndarray | None = None
    """float32"""
    values: np.ndarray | None = None
    """float32: the critic's, when the sample was scored"""
    returns: np.ndarray | None = None
    """float32: what the critic is trained towards"""
    teacher: str = ""
    """Which of trainer.teachers it is distilled from; empty is the one called "default"."""
    teacher_logprobs: np.ndarray | None = None
    """float32"""
    teacher_topk_ids: np.ndarray | None = None
    """int32 [num_tokens, k]: the teacher's k likeliest tokens in the place of token t"""
    teacher_topk_logprobs: np.ndarray | None = None
    """float32 [num_tokens, k]"""
    routing: np.ndarray | None = None
    """uint8 or int16 [num_tokens - 1, num_moe_layers, top_k]: experts to go through, see paceline.routing"""

    def check(self, vocabulary: int) -> None:
        """InvalidDatum unless lengths, ids, weights and temperature are usable with a vocabulary of that size."""
        count = len(self.token_ids)
        if count < 1:
            raise InvalidDatum(f"{self.name}: token_ids is empty")
        for field in _ARRAYS:
            values = getattr(self, field)
            if values is None:
                continue
            if values.shape != (count,):
                raise InvalidDatum(
                    f"{self.name}: {field} has shape {list(values.shape)}, token_ids has {count} entries"
                )
            if not np.isfinite(values).all():
                raise InvalidDatum(f"{self.name}: {field} holds a value that is not finite")
        self._check_ids("token id", self.token_ids, vocabulary)
        self._check_topk(count, vocabulary)
        if self.weights[0] != 0:
            raise InvalidDatum(
                f"{self.name}: weights[0] is {self.weights[0]}; the first token is predicted from nothing"
            )
        if not (self.temperature > 0 and np.isfinite(self.temperature)):
            raise InvalidDatum(f"{self.name}: temperature {self.temperature} must be positive and finite")

    def _check_ids(self, what: str, ids: np.ndarray, vocabulary: int) -> None:
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= vocabulary:
            raise InvalidDatum(
                f"{self.name}: {what} {low if low < 0 else high} is outside the vocabulary of {vocabulary}"
            )

    def _check_topk(self, count: int, vocabulary: int) -> None:
        ids, logprobs = self.teacher_topk_ids, self.teacher_topk_logprobs
        if ids is None and logprobs is None:
            return
        if ids is None or logprobs is None or ids.shape != logprobs.shape or ids.ndim != 2 or len(ids) != count:
            shapes = [None if item is None else list(item.shape) for item in (ids, logprobs)]
            raise InvalidDatum(
                f"{self.name}: teacher_topk_ids and teacher_topk_logprobs have the shapes {shapes[0]} and {shapes[1]}; "
                f"both must be [{count}, k]"
            )
        if not np.isfinite(logprobs).all():
            raise InvalidDatum(f"{self.name}: teacher_topk_logprobs holds a value that is not finite")
        if ids.size:
            self._check_ids("teacher's token id", ids, vocabulary)


Group = Sequence[Datum]
"""Datums that are kept in one micro-batch and may share a prefix."""
