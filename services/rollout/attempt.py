"""One attempt at one prompt: what it ends in is decided here, and entered into the ledger by production."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import dataclass

from paceline.blobs import BlobKeeper
from paceline.config import RunFile
from paceline.config.kinds import is_generated
from paceline.ids import sample_seed
from paceline.ledger import Issue
from paceline.rpc import errors
from paceline.samples import InvalidSample, SampleGroup, check_group
from paceline.telemetry import tracing
from services.rollout.admission import Bounds
from services.rollout.board import GroupBoard
from services.rollout.datasets import Dataset
from services.rollout.episodes.base import GroupTask, Refused
from services.rollout.filters.base import Filter
from services.rollout.first_look import FirstLook
from services.rollout.generation import Deadline
from services.rollout.given import GivenProducer
from services.rollout.producer import Producer

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Kept:
    """The group goes to the trainer."""

    group: SampleGroup


@dataclass(frozen=True)
class Dropped:
    """A filter or the episode refused it; the next prompt takes its place."""

    reason: str


@dataclass(frozen=True)
class Failed:
    """It is issued again, or dead after `limit` failures; limit 0 does not count it: the prompt is not to blame."""

    error: str
    limit: int


Outcome = Kept | Dropped | Failed


class Attempts:
    """Makes groups."""

    def __init__(
        self, config: RunFile, dataset: Dataset, producer: Producer | GivenProducer, filters: list[Filter],
        board: GroupBoard, blobs: BlobKeeper | None = None,
    ) -> None:  # fmt: skip
        self._blobs = blobs
        self._config = config
        self._dataset = dataset
        self._producer = producer
        self._filters = filters
        self._bounds = Bounds.of(config)
        self._board = board
        self._first_look = FirstLook(config.rollout.groups_per_step, graded=is_generated(config))

    async def make(self, issue: Issue, weight_version: int) -> Outcome:
        """Generate, grade and filter one group while `weight_version` is the newest. Never raises for a bad prompt."""
        try:
            task = self._task(issue, weight_version)
            try:
                return await self._make(issue, task)
            except errors.PacelineError as error:
                return await self._failed(error, task)
        except Refused as refusal:
            log.info("group %s dropped, %s: %s", issue.group_id, refusal.reason, refusal)
            return Dropped(refusal.reason)
        except InvalidSample as error:
            return Failed(f"INVALID_ARGUMENT: {error}", self._config.rollout.max_attempts)
        except Exception as error:
            # Sources, episodes and filters are anyone's code: a fault of theirs costs this prompt, not the run.
            log.exception("attempt %d at group %s", issue.attempt, issue.group_id)
            return Failed(f"INTERNAL: {type(error).__name__}: {error}", self._config.rollout.max_attempts)

    def _task(self, issue: Issue, weight_version: int) -> GroupTask:
        rollout, seed = self._config.rollout, self._config.run.seed
        return GroupTask(
            group_id=issue.group_id, request_id=f"{issue.group_id}#{issue.attempt}",
            prompt=self._dataset.prompt(issue.group_id),
            seeds=[sample_seed(seed, issue.group_id, sibling) for sibling in range(rollout.samples_per_group)],
            sampling=rollout.sampling, gate=self._bounds.gate(weight_version),
            deadline=Deadline(rollout.group_deadline_seconds), with_routing=self._config.trainer.routing_replay,
        )  # fmt: skip

    async def _make(self, issue: Issue, task: GroupTask) -> Outcome:
        samples = await self._producer.produce(task, self._board)
        group = SampleGroup(
            run_id=self._config.run.name, group_id=issue.group_id, attempt=issue.attempt, samples=samples,
            prompt_id=task.prompt.prompt_id, prompt_text=task.prompt.shown,
            metadata_json=json.dumps(task.prompt.metadata, default=str), traceparent=tracing.current_traceparent(),
            finished_time=time.time(),
        )  # fmt: skip
        check_group(group)
        self._first_look.add(group)
        for item in self._filters:
            reason = item.keep(group)
            if reason is not None:
                return Dropped(reason)
        if self._blobs is not None:
            await self._blobs.write(group)
        return Kept(group)

    async def _failed(self, error: errors.PacelineError, task: GroupTask) -> Failed:
        text = f"{error.code.name}: {error.message}"
        if isinstance(error, errors.InvalidArgument):
            return Failed(text, 1)  # The same request would be refused again.
        limit = self._config.rollout.max_attempts if await self._producer.blames(error, task, self._board) else 0
        return Failed(text, limit)
