"""Evaluations on the shared engines: pinned to one weight version, recorded once, while new training prompts wait."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from opentelemetry.util.types import AttributeValue

from paceline.api.common.v1.generation_pb2 import VersionGate
from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.api.rollout.v1 import rollout_service_pb2 as pb
from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.config import RunFile
from paceline.config.data import EvaluationConfig
from paceline.ids import sample_seed
from paceline.rpc import errors
from paceline.rpc.patience import PAUSE_SECONDS, until_available
from paceline.rpc.status import Activity, StatusBoard
from paceline.samples import Sample
from paceline.telemetry import names, tracing
from services.rollout.board import GroupBoard
from services.rollout.episodes.base import GroupTask, Refused
from services.rollout.evaluation_metrics import summarize
from services.rollout.evaluation_store import EvaluationStore
from services.rollout.generation import Deadline
from services.rollout.producer import Producer
from services.rollout.sources.base import Source
from services.rollout.versions import NewestVersion

log = logging.getLogger(__name__)

CALL_SECONDS = 10.0


class VersionGone(errors.FailedPrecondition):
    """The pinned version can no longer be served."""


@dataclass(frozen=True)
class Evaluation:
    """One evaluation of the run file, with its data."""

    config: EvaluationConfig
    source: Source


def is_due(config: EvaluationConfig, step: int, last: int | None, final: int) -> bool:
    """Whether the weights of `step` are to be evaluated, when `last` was the last step that was (None: none)."""
    every = config.every_steps
    if every == 0 or (last is not None and last >= step):
        return False
    return step >= final or last is None or step // every > last // every


class Evaluator:
    """Runs evaluations, one at a time."""

    def __init__(
        self, config: RunFile, evaluations: list[Evaluation], producer: Producer, store: EvaluationStore,
        coordinator: coordinator_grpc.CoordinatorServiceAsyncStub, status: StatusBoard, versions: NewestVersion,
    ) -> None:  # fmt: skip
        self._config = config
        self._evaluations = evaluations
        self._producer = producer
        self._store = store
        self._coordinator = coordinator
        self._versions = versions
        self._status = status
        self._activity: Activity = status.activity("evaluation")
        self._board = GroupBoard(status.activity("evaluation prompts"))
        self._turn = asyncio.Lock()
        self._full_marks = sum(max(0.0, grader.weight) for grader in config.reward.graders)
        self._last: dict[str, int | None] = {}

    @property
    def names(self) -> list[str]:
        """Evaluations of the run file."""
        return [item.config.name for item in self._evaluations]

    async def run_due(self, version: WeightVersion) -> None:
        """Run and record what is due after the step behind `version`. Skips what was recorded before."""
        for item in self._evaluations:
            name = item.config.name
            if item.config.every_steps and name not in self._last:
                self._last[name] = await until_available(
                    lambda name=name: self._store.last_step(name), "Redis", self._activity.waiting
                )
            if is_due(item.config, version.step, self._last.get(name), self._config.run.steps):
                await self._run(item, version, move_on=True)

    async def run(self, name: str, weight_version: int) -> list[pb.EvaluationResult]:
        """Run one evaluation, or all with an empty name, at a version (0: the newest). NotFound lists what there is;
        FailedPrecondition when the version cannot be served."""
        chosen = [item for item in self._evaluations if name in ("", item.config.name)]
        if not chosen:
            there = ", ".join(self.names) or "none: add [[evaluation]] to the run file"
            raise errors.NotFound(f"there is no evaluation {name!r}; the run has {there}")
        newest = await self._versions.first(self._activity)
        version = newest if weight_version in (0, newest.weight_version) else await self._look_up(weight_version)
        return [await self._run(item, version, move_on=weight_version == 0) for item in chosen]

    async def _look_up(self, weight_version: int) -> WeightVersion:
        request = coordinator_pb.GetVersionRequest(run_id=self._config.run.name, weight_version=weight_version)
        response = await self._coordinator.GetVersion(request, timeout=CALL_SECONDS)
        return response.version

    async def _run(self, item: Evaluation, version: WeightVersion, move_on: bool) -> pb.EvaluationResult:
        """Evaluate and record. With `move_on`, a version that training has left behind gives way to the newest."""
        async with self._turn:
            while True:
                self._activity.set(f"{item.config.name} at weight version {version.weight_version}")
                try:
                    result = await self._measure(item, version)
                    break
                except VersionGone as error:
                    newest = self._versions.current
                    if not move_on:
                        raise
                    if newest is not None and newest.weight_version != version.weight_version:
                        log.info("evaluation %s moves on to weight version %d", item.config.name, newest.weight_version)
                        version = newest
                    else:
                        with self._activity.waiting(f"the router: {error.message}"):
                            await asyncio.sleep(PAUSE_SECONDS)
            await self._record(item.config.name, version, result)
            self._activity.set("idle")
            return result

    async def _measure(self, item: Evaluation, version: WeightVersion) -> pb.EvaluationResult:
        began = time.monotonic()
        config = item.config
        attributes: dict[str, AttributeValue] = {
            names.ATTRIBUTE_EVALUATION: config.name,
            names.ATTRIBUTE_WEIGHT_VERSION: version.weight_version,
        }
        count = min(config.num_prompts, len(item.source))
        room = asyncio.Semaphore(self._config.rollout.max_in_flight)
        work: list[asyncio.Task[list[Sample]]] = []
        gone: VersionGone | None = None
        with tracing.span(names.SPAN_ROLLOUT_EVALUATE, attributes):
            try:
                async with asyncio.TaskGroup() as tasks:
                    work += [tasks.create_task(self._prompt(item, index, version, room)) for index in range(count)]
            except* VersionGone as found:
                gone = next(error for error in found.exceptions if isinstance(error, VersionGone))
        if gone is not None:
            raise gone
        values = summarize([task.result() for task in work], config.samples_per_prompt, self._full_marks)
        values[names.SECONDS_EVALUATION] = time.monotonic() - began
        return pb.EvaluationResult(
            name=config.name, weight_version=version.weight_version, num_prompts=count,
            num_missing=int(values[names.REWARD_MISSING]), values=values,
        )  # fmt: skip

    async def _prompt(
        self, item: Evaluation, index: int, version: WeightVersion, room: asyncio.Semaphore
    ) -> list[Sample]:
        """Graded samples of one prompt; none when it cannot be used or failed as often as a prompt may."""
        group_id = f"eval-{item.config.name}-{index}"
        failures, attempt = 0, 0
        async with room:
            with self._board.group(group_id):
                while failures < self._config.rollout.max_attempts:
                    attempt += 1
                    task = self._task(item, index, group_id, attempt, version)
                    try:
                        return await self._producer.produce(task, self._board)
                    except Refused as refusal:
                        log.warning("evaluation prompt %s cannot be used: %s", group_id, refusal)
                        return []
                    except errors.FailedPrecondition as error:
                        raise VersionGone(error.message) from error
                    except errors.PacelineError as error:
                        log.warning("evaluation prompt %s, attempt %d: %s", group_id, attempt, error)
                        failures += await self._producer.blames(error, task, self._board)
                        with self._board.waiting(group_id, error.message):
                            await asyncio.sleep(PAUSE_SECONDS)
        return []

    def _task(self, item: Evaluation, index: int, group_id: str, attempt: int, version: WeightVersion) -> GroupTask:
        seeds = range(item.config.samples_per_prompt)
        return GroupTask(
            group_id=group_id, request_id=f"{group_id}@{version.weight_version}#{attempt}",
            prompt=item.source[index], seeds=[sample_seed(self._config.run.seed, group_id, i) for i in seeds],
            sampling=item.config.sampling, gate=VersionGate(exact_version=version.weight_version),
            deadline=Deadline(self._config.rollout.group_deadline_seconds),
        )  # fmt: skip

    async def _record(self, name: str, version: WeightVersion, result: pb.EvaluationResult) -> None:
        record = coordinator_pb.StepRecord(
            step=version.step, kind=coordinator_pb.RECORD_KIND_EVALUATION, name=name, values=result.values,
            weight_version=version.weight_version,
        )  # fmt: skip
        record.time.GetCurrentTime()
        request = coordinator_pb.RecordStepRequest(
            request_id=f"evaluation/{name}/{version.step}/{version.weight_version}/{record.time.ToNanoseconds()}",
            run_id=self._config.run.name, record=record,
        )  # fmt: skip
        await until_available(
            lambda: self._coordinator.RecordStep(request, timeout=CALL_SECONDS),
            "the coordinator", self._activity.waiting,
        )  # fmt: skip
        await until_available(lambda: self._store.set_last_step(name, version.step), "Redis", self._activity.waiting)
        self._last[name] = max(version.step, self._last.get(name) or 0)
