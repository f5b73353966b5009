"""The episode of a run of kind sft: the completion is in the data, and nothing is sampled."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from paceline.samples import Sample
from services.rollout.episodes.base import EpisodeContext, GroupTask
from services.rollout.labelling import Labeller, given_sample


@registry("episode").register("supervised")
class Supervised:
    """One sample a group: a prompt with its completion, or a conversation whose assistant's turns are learned.

    The completion is a text or a list of messages. A record without one must be a conversation (`prompt_field =
    "messages"` of the source); a message with `"weight": 0` is not learned. `tools` of a record reach the template.
    """

    class Options(StrictModel):
        """Options of the supervised episode."""

        completion_field: str = Field(default="completion", min_length=1)
        """Field of the record with the completion."""
        append_eos: bool = True
        """End a completion of plain text with the model's end-of-sequence token, unless it ends with one."""
        turns: Literal["all", "last"] = "all"
        """Learn all turns of the assistant, or the last one only."""

    def __init__(self, options: Options, context: EpisodeContext) -> None:
        self._options = options
        self._tokenizer = context.tokenizer
        self._labeller = Labeller(context.tokenizer, context.config.data, options.append_eos)

    async def run(self, task: GroupTask) -> list[Sample]:
        field = self._options.completion_field
        completion = task.prompt.metadata.get(field)
        example = self._labeller.example(task.prompt, completion, field, self._options.turns == "last")
        return [given_sample(task, 0, example, self._tokenizer)]
