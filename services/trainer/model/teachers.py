"""The frozen models that a policy is distilled from, by the key that a datum names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.config import ConfigError
from paceline.config.trainer import TeacherConfig
from services.trainer.datum import Datum, InvalidDatum
from services.trainer.model.policy import Policy
from services.trainer.packing import PackedBatch

DEFAULT = "default"


@dataclass
class TeacherScores:
    """What the teachers say about the N predicted tokens of a micro-batch."""

    logprobs: Tensor
    """[N]: of the token itself."""
    ids: Tensor
    """int64 [N, k]: the likeliest tokens in its place."""
    topk: Tensor
    """[N, k]: their log-probabilities."""


class Teachers:
    """Loads every teacher once. ConfigError when one has another vocabulary than the policy."""

    def __init__(self, teachers: Mapping[str, TeacherConfig], dtype: torch.dtype, device: str, vocabulary: int) -> None:
        self._models: dict[str, Policy] = {}
        for key, table in teachers.items():
            model = Policy(Path(table.path), dtype, None, 0, device, frozen=True)
            if model.vocabulary != vocabulary:
                raise ConfigError(
                    f"trainer.teachers.{key}.path = {table.path!r}: its vocabulary has {model.vocabulary} tokens, the "
                    f"policy's {vocabulary}; a teacher must have the policy's tokenizer"
                )
            self._models[key] = model

    @property
    def models(self) -> list[torch.nn.Module]:
        """All teachers' modules."""
        return [item.model for item in self._models.values()]

    @torch.no_grad()
    def score(self, batch: PackedBatch, data: Sequence[Datum], k: int = 0) -> TeacherScores:
        """Scores of the micro-batch, each token by its datum's teacher at the datum's temperature.

        k is the number of likeliest tokens. InvalidDatum names a datum whose teacher does not exist.
        """
        key_of = {index: self._key(data[index]) for index in np.unique(batch.datum_index).tolist()}
        keys = np.array([key_of[index] for index in batch.datum_index.tolist()])
        found: TeacherScores | None = None
        for key in sorted(set(key_of.values())):
            scores = TeacherScores(*self._models[key].teach(batch, k))
            own = torch.from_numpy(keys == key).to(scores.logprobs.device)
            found = scores if found is None else _mixed(own, scores, found)
        if found is None:
            raise ValueError("the micro-batch has no token to score")
        return found

    def _key(self, datum: Datum) -> str:
        key = datum.teacher or DEFAULT
        if key in self._models:
            return key
        named = f"names the teacher {datum.teacher!r}" if datum.teacher else "names no teacher, and none is the default"
        raise InvalidDatum(f"{datum.name}: {named}; trainer.teachers has {', '.join(self._models) or 'none'}")


def _mixed(own: Tensor, scores: TeacherScores, others: TeacherScores) -> TeacherScores:
    rows = own.unsqueeze(1)
    return TeacherScores(
        torch.where(own, scores.logprobs, others.logprobs), torch.where(rows, scores.ids, others.ids),
        torch.where(rows, scores.topk, others.topk),
    )  # fmt: skip
