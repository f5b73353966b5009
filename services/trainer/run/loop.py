"""The training loop: claim, train, publish, checkpoint, record, commit; then export. One client of the backend."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from typing import Any

from opentelemetry.util.types import AttributeValue

from paceline import recording
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.config.kinds import is_generated
from paceline.ids import GroupId
from paceline.rpc import errors
from paceline.rpc.patience import until_available
from paceline.rpc.status import timestamp
from paceline.samples import InvalidSample, SampleGroup
from paceline.stream import Claim, NotReady
from paceline.telemetry import names, tracing
from services.trainer.exporting import export_run
from services.trainer.room import until_room
from services.trainer.run.outcome import Outcome, outcome_of
from services.trainer.run.parts import Parts
from services.trainer.run.publication import Snapshot
from services.trainer.run.recovery import Recovery, StartingPoint
from services.trainer.run.saving import Saver
from services.trainer.run.spans import record_phases, set_values
from services.trainer.step.step_trainer import StepResult

log = logging.getLogger(__name__)

_LOOK_SECONDS = 5.0
"""How long a wait for groups lasts before the state of the run is looked at again."""


class RunEnded(Exception):
    """The run was ended by someone else while the trainer waited."""


class TrainingLoop:
    """Trains the run from where its newest checkpoint left it to its last step."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._activity = parts.status.activity("loop")
        self._rollout = parts.config.rollout
        self._given = not is_generated(parts.config)
        """The samples are given: nothing is published, as no engine waits for it, and nothing can be stale."""
        self._steps = parts.config.run.steps
        self._step = 0
        self._version = 0
        self._replay: tuple[int, ...] = ()
        self._record: dict[str, Any] | None = None
        self._saver = Saver(parts, self._activity)

    async def run(self) -> Outcome | None:
        """Go on from the newest checkpoint, train to the last step, export, and finish the run.

        None when the run was ended by someone else.
        """
        parts = self._parts
        try:
            await self._start()
            while self._step < self._steps:
                if parts.run_ended():
                    raise RunEnded
                await self._train_step(self._step + 1)
        except RunEnded:
            log.info("the run was ended; the trainer stops after step %d", self._step)
            await self._checkpoint(self._step)
            self._become("DONE")
            return None
        await self._checkpoint(self._step)
        outcome = outcome_of(await asyncio.to_thread(parts.metrics.records), self._step)
        if parts.config.trainer.export and not outcome.failed:
            self._activity.set("exporting the model")
            target = parts.config.directory / "export"
            await until_room(
                lambda: parts.worker.run(export_run, parts.backend, target, self._step, self._version),
                "the exported model", self._activity.waiting,
            )  # fmt: skip
        await self._await_evaluations()
        await parts.control.finish(outcome.reason, outcome.failed)
        self._activity.set("done")
        self._become("DONE")
        return outcome

    async def _await_evaluations(self) -> None:
        """Everything stops when the run is finished, so rollout may first evaluate the last weights."""
        wanted = {item.name for item in self._parts.config.evaluation if item.every_steps}
        if not wanted:
            return
        seconds = self._rollout.group_deadline_seconds
        missing = await self._parts.control.wait_for_evaluations(self._step, wanted, seconds)
        if missing:
            log.warning("evaluations %s of step %d did not come within %g s", sorted(missing), self._step, seconds)

    async def _start(self) -> None:
        parts = self._parts
        await parts.control.ensure_run(parts.config.digest(), self._steps)
        await parts.control.acquire()
        parts.ledger.hold(parts.control.fence, parts.control.incarnation)
        parts.stream.hold(parts.control.fence, parts.control.incarnation)
        start = await Recovery(parts, self._activity).recover()
        self._step, self._replay = start.step, start.replay
        self._saver.saved = start.step if start.checkpoint else -1
        await self._resume_records(start)
        if not self._replay:
            await self._publish(start.step, start.checkpoint.weight_version if start.checkpoint else 0)
        self._become("READY")
        await self._wait_for_ledger()
        await self._saver.sweep_blobs()

    async def _resume_records(self, start: StartingPoint) -> None:
        """metrics.jsonl and the coordinator hold the records up to the checkpoint, and no later one."""
        record = start.checkpoint.meta.get("record") if start.checkpoint else None
        record = await until_room(
            lambda: asyncio.to_thread(self._parts.metrics.rewind, start.step, record), "metrics.jsonl",
            self._activity.waiting,
        )  # fmt: skip
        if record is not None:
            await self._parts.control.record_step(_wire_record(record))

    async def _wait_for_ledger(self) -> None:
        """Until rollout has read the data and made the ledger."""
        parts = self._parts
        token = ""
        while True:
            token = await until_available(lambda: parts.ledger.wait_change("", 0.0), "Redis", self._activity.waiting)
            try:
                await until_available(parts.ledger.attach, "Redis", self._activity.waiting)
                await until_available(parts.stream.attach, "Redis", self._activity.waiting)
                return
            except errors.FailedPrecondition:
                await self._wait("rollout, which has not begun to read the data", token)

    async def _wait(self, cause: str, token: str) -> None:
        if self._parts.run_ended():
            raise RunEnded
        with self._activity.waiting(cause):
            await until_available(
                lambda: self._parts.ledger.wait_change(token, _LOOK_SECONDS), "Redis", self._activity.waiting
            )
        if self._parts.run_ended():
            raise RunEnded

    async def _train_step(self, step: int) -> None:
        parts = self._parts
        began = time.time()
        claim = await self._claim(step)
        claimed = time.time()
        self._version = max(self._version, claim.trainer_version)
        links = [group.traceparent for group in claim.groups]
        attributes: dict[str, AttributeValue] = {
            names.ATTRIBUTE_STEP: step, names.ATTRIBUTE_WEIGHT_VERSION: claim.trainer_version,
        }  # fmt: skip
        with tracing.span(names.SPAN_TRAINER_STEP, attributes, links=links, start_time=began) as span:
            tracing.record_span(names.SPAN_TRAINER_CLAIM, began, claimed, {names.ATTRIBUTE_STEP: step})
            self._activity.set(f"training step {step} on {len(claim.groups)} groups")
            await self._dump(step, claim.groups)
            if parts.blobs is not None:
                await parts.blobs.read(claim.groups)
            result = await parts.worker.run(parts.trainer.train, step, claim.groups)
            record_phases(step, claim.groups, result, claimed)
            await until_available(lambda: parts.stream.mark_trained(step), "Redis", self._activity.waiting)
            self._step = step
            await self._saver.finish()
            self._add_claim(result, claim, claimed - began)
            published = time.time()
            await self._after(step)
            result.values[names.SECONDS_PUBLISH] = time.time() - published
            result.values[names.SECONDS_STEP] = time.time() - began
            due = step % parts.config.trainer.checkpoint_every == 0 or step == self._steps or self._saver.owed
            self._record = self._make_record(step, claim.groups, result)
            checkpoint = None
            if due:
                before = time.time()
                if parts.config.trainer.async_checkpoints and step < self._steps and not self._saver.owed:
                    await self._saver.begin(step, self._version, self._record)
                else:
                    checkpoint = await self._saver.write(step, self._version, self._record)
                self._record[names.SECONDS_CHECKPOINT] = time.time() - before
                self._record[names.SECONDS_STEP] = time.time() - began
            set_values(span, self._record)
            await self._store_record(self._record)
        if checkpoint is not None:
            await self._saver.commit(checkpoint)

    async def _claim(self, step: int) -> Claim:
        parts, rollout = self._parts, self._rollout
        bound = None if self._given or rollout.max_staleness == "unbounded" else rollout.max_staleness
        consumer = parts.status.member_id
        while True:
            token = await until_available(lambda: parts.ledger.wait_change("", 0.0), "Redis", self._activity.waiting)
            answer: Claim | NotReady = await until_available(
                lambda: parts.stream.claim(
                    consumer, step, rollout.groups_per_step, self._version, bound, rollout.too_stale,
                    in_data_order=self._given,
                ), "Redis", self._activity.waiting,
            )  # fmt: skip
            if isinstance(answer, Claim):
                return answer
            await self._wait(f"rollout: {answer.have} of {answer.want} groups of step {step}", token)

    async def _dump(self, step: int, groups: list[SampleGroup]) -> None:
        """Keep what the step is trained on, if that is asked for. A replay writes the same file again."""
        if self._rollout.dump:
            directory = self._parts.config.directory / "rollouts"
            await until_room(
                lambda: asyncio.to_thread(recording.write_step, directory, step, groups), "the dumped rollouts",
                self._activity.waiting,
            )  # fmt: skip

    async def _after(self, step: int) -> None:
        """Publish, unless a recorded step follows: its groups were made by a version that exists already."""
        later = [item for item in self._replay if item > step]
        if not later:
            self._replay = ()
            await self._publish(step, self._version)
            return
        self._activity.set(f"replaying steps {later[0]} to {later[-1]}")
        self._version = (await self._claim(later[0])).trainer_version

    async def _publish(self, step: int, floor: int) -> None:
        parts = self._parts
        if self._given:
            return
        self._activity.set(f"publishing the weights of step {step}")
        snapshot = await parts.worker.run(Snapshot.take, parts.backend, step)
        version = await parts.publisher.publish(snapshot, floor)
        self._version = parts.status.weight_version = version.weight_version
        parts.report()

    def _add_claim(self, result: StepResult, claim: Claim, waited: float) -> None:
        staleness = [claim.trainer_version - version for version in map(_oldest, claim.groups) if version is not None]
        result.values[names.GROUPS_REFUSED_STALE] = claim.refused
        result.values[names.SECONDS_WAIT_GROUPS] = waited
        if staleness and not self._given:
            result.values[names.STALENESS_MEAN] = sum(staleness) / len(staleness)
            result.values[names.STALENESS_MAX] = max(staleness)

    def _make_record(self, step: int, groups: list[SampleGroup], result: StepResult) -> dict[str, Any]:
        ordered = sorted((group.group_id for group in groups), key=GroupId.parse)
        finite = {name: value for name, value in result.values.items() if math.isfinite(value)}
        return {
            "step": step, "weight_version": self._version, "time": time.time(), "group_ids": ordered,
            "trace_id": tracing.trace_id(tracing.current_traceparent()), **finite,
        }  # fmt: skip

    async def _store_record(self, record: dict[str, Any]) -> None:
        self._parts.status.gauges.update({"step": record["step"], "reward_mean": record.get(names.REWARD_MEAN, 0.0)})
        await self._parts.control.record_step(_wire_record(record))
        await until_room(
            lambda: asyncio.to_thread(self._parts.metrics.append, record), "metrics.jsonl", self._activity.waiting
        )

    async def _checkpoint(self, step: int) -> None:
        """The checkpoint of the last step, when it has none yet."""
        await self._saver.finish()
        if step > 0 and self._saver.saved != step:
            await self._saver.commit(await self._saver.write(step, self._version, self._record))

    def _become(self, state: str) -> None:
        self._parts.status.state = state
        self._parts.report()


def _wire_record(record: dict[str, Any]) -> pb.StepRecord:
    values = {name: float(record[name]) for name in names.UNITS if name in record}
    return pb.StepRecord(
        step=record["step"], kind=pb.RECORD_KIND_TRAIN, values=values, weight_version=record["weight_version"],
        time=timestamp(record["time"]), group_ids=record["group_ids"], trace_id=record["trace_id"],
    )  # fmt: skip


def _oldest(group: SampleGroup) -> int | None:
    try:
        return group.oldest_version
    except InvalidSample:
        return None
