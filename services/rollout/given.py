"""Production without engines: what stands in for router, reward and weight versions where the samples are given."""

from __future__ import annotations

import asyncio

from paceline.api.common.v1 import generation_pb2 as pb
from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.config import ConfigError, RunFile
from paceline.config.data import SamplingConfig
from paceline.rpc import errors
from paceline.rpc.status import Activity
from paceline.samples import Sample
from services.rollout.board import GroupBoard
from services.rollout.datasets import Dataset
from services.rollout.episodes.base import Episode, GroupTask, Refused
from services.rollout.generation import Deadline, GenerationClient, Sequence
from services.rollout.labelling import GIVEN_VERSION, UNUSABLE

READING = "reading"
UNBOUNDED = 2**31 - 1
"""Capacity of a stream that refuses nothing."""
_FIRST_SECONDS = 60.0


class NoEngines(GenerationClient):
    """Refuses what an episode asks of engines in a run that starts none."""

    def __init__(self, config: RunFile) -> None:
        run = config.run
        self._words = f"run {run.name} (run.kind = {run.kind!r}) starts no engine, as its samples are given"

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingConfig, seeds: list[int], gate: pb.VersionGate,
        session_id: str, timeout: float, with_routing: bool = False,
    ) -> list[Sequence]:  # fmt: skip
        raise errors.InvalidArgument(self._words)

    async def abort(self, request_id: str) -> None:
        raise errors.InvalidArgument(self._words)

    async def could_serve(self, gate: pb.VersionGate) -> bool:
        return False


class GivenProducer:
    """Runs episodes that need nobody, in place of a Producer."""

    def __init__(self, episode: Episode) -> None:
        self._episode = episode

    async def produce(self, task: GroupTask, board: GroupBoard) -> list[Sample]:
        """The samples of the data. DeadlineExceeded when an episode of the user's takes too long."""
        board.stage(task.group_id, READING)
        try:
            async with asyncio.timeout(task.deadline.left):
                return await self._episode.run(task)
        except TimeoutError as error:
            raise errors.DeadlineExceeded(
                f"{task.group_id} was not finished after {task.deadline.seconds:g} s ({READING})"
            ) from error

    async def blames(self, error: errors.PacelineError, task: GroupTask, board: GroupBoard) -> bool:
        """Nobody else can have been away."""
        return True

    async def check_first(self, dataset: Dataset) -> None:
        """ConfigError when the first example shows that the run file does not fit the data."""
        task = GroupTask("e0.0", "first", dataset.prompt("e0.0"), [0], SamplingConfig(), pb.VersionGate(),
                         Deadline(_FIRST_SECONDS))  # fmt: skip
        try:
            await self._episode.run(task)
        except Refused as refusal:
            if refusal.reason in UNUSABLE:
                raise ConfigError(f"data.source: {refusal}") from refusal


class NoVersions:
    """Stands in for NewestVersion: given samples belong to no step, and wait for no weights."""

    def __init__(self) -> None:
        self.current = WeightVersion(weight_version=GIVEN_VERSION, step=0)

    async def first(self, activity: Activity) -> WeightVersion:
        """The one there is."""
        return self.current
