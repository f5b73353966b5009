"""The episode of a run of kind dpo: a completion that was preferred and one that was not, both in the data."""

from __future__ import annotations

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from paceline.samples import Sample
from services.rollout.episodes.base import EpisodeContext, GroupTask, Refused
from services.rollout.labelling import Labeller, given_sample

CHOSEN, REJECTED = 1.0, -1.0
"""The labels, by whose sign the loss tells the two apart."""


@registry("episode").register("preference")
class Preference:
    """Two samples a group that share the prompt: the chosen one, with the reward 1, and the rejected one, with -1.

    Both are texts or lists of messages; a list may begin with the prompt's messages. Only what follows the prompt is
    learned.
    """

    class Options(StrictModel):
        """Options of the preference episode."""

        chosen_field: str = Field(default="chosen", min_length=1)
        """Field of the record with the better completion."""
        rejected_field: str = Field(default="rejected", min_length=1)
        """Field of the record with the worse one."""
        append_eos: bool = True
        """End a completion of plain text with the model's end-of-sequence token, unless it ends with one."""

    def __init__(self, options: Options, context: EpisodeContext) -> None:
        self._options = options
        self._tokenizer = context.tokenizer
        self._labeller = Labeller(context.tokenizer, context.config.data, options.append_eos)

    async def run(self, task: GroupTask) -> list[Sample]:
        prompt, examples = task.prompt, []
        for field in (self._options.chosen_field, self._options.rejected_field):
            completion = prompt.metadata.get(field)
            if completion is None:
                known = ", ".join(sorted(prompt.metadata)) or "none"
                raise Refused(
                    "malformed_example", f"example {prompt.prompt_id} has no field {field!r}; its fields are {known}"
                )
            examples.append(self._labeller.example(prompt, completion, field))
        if examples[0].token_ids == examples[1].token_ids:
            raise Refused("no_preference", f"example {prompt.prompt_id}: both completions are the same tokens")
        labelled = zip(examples, (CHOSEN, REJECTED), strict=True)
        return [
            given_sample(task, index, example, self._tokenizer, label)
            for index, (example, label) in enumerate(labelled)
        ]
