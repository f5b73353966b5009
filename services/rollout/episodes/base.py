"""What an episode is: how the samples of one prompt come about, from the prompt to the last token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from paceline.api.common.v1.generation_pb2 import VersionGate
from paceline.config import RunFile
from paceline.config.data import SamplingConfig
from paceline.samples import Sample
from paceline.tokenizer import Tokenizer
from services.rollout.generation import Deadline, GenerationClient
from services.rollout.sources.base import Prompt


class Refused(Exception):
    """The prompt cannot be used, now or ever; it is dropped under this reason and replaced by the next one."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        """One short word, as "prompt_too_long"."""


@dataclass(frozen=True)
class EpisodeContext:
    """What an episode works with, the same for all groups."""

    config: RunFile
    tokenizer: Tokenizer
    generation: GenerationClient


@dataclass(frozen=True)
class GroupTask:
    """One attempt at one prompt."""

    group_id: str
    request_id: str
    """Unique in the run; the id, or a prefix of the ids, of the requests to the router."""
    prompt: Prompt
    seeds: list[int]
    """One sample for each."""
    sampling: SamplingConfig
    gate: VersionGate
    """Which weights may produce tokens."""
    deadline: Deadline
    with_routing: bool = False
    """The experts of each token are wanted too: put them into `attached` of the samples, as paceline.routing says."""


class Episode(Protocol):
    """An episode plug-in is a class with a nested `Options` model, made as `Class(options, context)`."""

    async def run(self, task: GroupTask) -> list[Sample]:
        """The samples of the group, without rewards; trajectory i was drawn under `task.seeds[i]`.

        A trajectory that failed alone is one FAILED sample; its siblings stand. Refused for a prompt that cannot be
        used. PacelineError when the attempt failed and another one may help.
        """
        ...
