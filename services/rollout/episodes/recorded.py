"""The episode of a run on recorded groups: their samples and rewards as they are, under the run's own ids."""

from __future__ import annotations

from dataclasses import replace

from paceline.config import StrictModel
from paceline.plugins import registry
from paceline.samples import Sample
from services.rollout.episodes.base import EpisodeContext, GroupTask, Refused
from services.rollout.sources.recorded import RecordedPrompt


@registry("episode").register("recorded")
class Recorded:
    """The group that the source `recorded` read. Its rewards were given when it was made."""

    class Options(StrictModel):
        """The recorded episode has no options."""

    def __init__(self, options: Options, context: EpisodeContext) -> None:
        self._options = options

    async def run(self, task: GroupTask) -> list[Sample]:
        if not isinstance(task.prompt, RecordedPrompt):
            raise Refused("malformed_example", f"prompt {task.prompt.prompt_id} is no recorded group")
        group = task.prompt.group

        def renamed(name: str) -> str:
            return task.group_id + name.removeprefix(group.group_id)

        return [
            replace(item, sample_id=renamed(item.sample_id), trajectory_id=renamed(item.trajectory_id), blobs={})
            for item in group.samples
        ]
