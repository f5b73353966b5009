"""Prompts that reasoning-gym makes up as they are asked for: any task of it, with its own scorer."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field

from paceline.config import ConfigError, StrictModel
from paceline.plugins import registry
from paceline.tokenizer import require
from services.rollout.sources.base import Prompt


@registry("source").register("reasoning_gym")
class ReasoningGym:
    """`{name = "reasoning_gym", task = "chain_sum", config = {min_terms = 2, max_terms = 2}}`.

    Metadata holds `task` and `entry`, the task's whole record, which the grader of the same name scores by.
    """

    class Options(StrictModel):
        """Options of the reasoning_gym source."""

        task: str
        """A task of reasoning-gym: "chain_sum", "letter_counting"."""
        size: int = Field(default=1000, ge=1)
        """How many prompts there are."""
        seed: int = Field(default=0, ge=0)
        """Seed of the task's generator; an evaluation should have another one."""
        config: dict[str, Any] = {}
        """Options of the task."""
        instruction: str = ""
        """Text after each question, on a line of its own."""

    def __init__(self, options: Options, max_malformed: int = 0) -> None:
        gym = require("reasoning_gym")
        tasks = require("reasoning_gym.factory").DATASETS
        if options.task not in tasks:
            raise ConfigError(f"reasoning_gym has no task {options.task!r}; it has {', '.join(sorted(tasks))}")
        try:
            self._dataset = gym.create_dataset(options.task, size=options.size, seed=options.seed, **options.config)
        except (TypeError, ValueError, AssertionError) as error:
            raise ConfigError(f"reasoning_gym task {options.task!r} refuses its config: {error}") from error
        self._options = options
        self.malformed = 0

    def __len__(self) -> int:
        return self._options.size

    def __getitem__(self, index: int) -> Prompt:
        if not 0 <= index < self._options.size:
            raise IndexError(index)
        entry = self._dataset[index]
        options = self._options
        text = f"{entry['question']}\n{options.instruction}" if options.instruction else entry["question"]
        metadata = {"task": options.task, "entry": json.loads(json.dumps(entry, default=str))}
        return Prompt(f"{options.task}:{options.seed}:{index}", text=text, metadata=metadata)
