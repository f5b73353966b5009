"""Scores by the task's own verifier of the reasoning-gym package, which may give partial credit."""

from __future__ import annotations

import re
from typing import Any, Literal

from paceline.config import StrictModel
from paceline.plugins import registry
from services.reward.graders.base import GradeItem

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@registry("grader").register("reasoning_gym")
class ReasoningGym:
    """For prompts of the `reasoning_gym` source, whose metadata names the task and holds its whole entry."""

    class Options(StrictModel):
        task_field: str = "task"
        """Metadata field with the task's name: "chain_sum"."""
        entry_field: str = "entry"
        """Metadata field with the task's entry: an object with question, answer and metadata."""
        extract: Literal["whole", "last_number", "first_line"] = "whole"
        """What of the response is the answer. Small models rarely answer with the answer alone."""

    def __init__(self, options: Options) -> None:
        import reasoning_gym

        self._options = options
        self._find: Any = reasoning_gym.get_score_answer_fn
        self._scorers: dict[str, Any] = {}

    def required_metadata(self) -> tuple[str, ...]:
        return (self._options.task_field, self._options.entry_field)

    def grade(self, item: GradeItem) -> float:
        task = item.metadata[self._options.task_field]
        if task not in self._scorers:
            self._scorers[task] = self._find(task)
        return self._scorers[task](self._answer(item.response), item.metadata[self._options.entry_field])

    def _answer(self, response: str) -> str:
        if self._options.extract == "last_number":
            numbers = _NUMBER.findall(response)
            return numbers[-1].replace(",", "") if numbers else ""
        if self._options.extract == "first_line":
            return next((line.strip() for line in response.splitlines() if line.strip()), "")
        return response.strip()
