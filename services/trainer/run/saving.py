"""The loop's checkpoints: durable before anything is acknowledged, written at once or while the next step runs."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import dataclass
from typing import Any

from paceline.rpc.patience import until_available
from paceline.rpc.status import Activity
from paceline.telemetry import names, tracing
from services.trainer.checkpoint import Checkpoint, step_name
from services.trainer.room import until_room, with_place
from services.trainer.run.parts import Parts
from services.trainer.run.recovery import LEDGER_PART

log = logging.getLogger(__name__)


@dataclass
class _Pending:
    """A checkpoint whose files are being written."""

    step: int
    weight_version: int
    parts: dict[str, bytes]
    meta: dict[str, Any]


class Saver:
    """Writes checkpoints of one run and acknowledges the groups in them."""

    def __init__(self, parts: Parts, activity: Activity) -> None:
        self._parts = parts
        self._activity = activity
        self._pending: _Pending | None = None
        self.saved = -1
        """Last step that is in a checkpoint or in one that is being written."""
        self.owed = False
        """A checkpoint that was written in the background was lost; the next step owes one."""

    async def write(self, step: int, weight_version: int, record: dict[str, Any] | None) -> Checkpoint:
        """Write a checkpoint and return when it is durable. It counts once the coordinator knows it; see commit."""
        pending = await self._describe(step, weight_version, record)
        with tracing.span(names.SPAN_TRAINER_CHECKPOINT, {names.ATTRIBUTE_STEP: step}):
            checkpoint = await until_room(
                lambda: self._try(pending), f"the checkpoint of step {step}", self._activity.waiting
            )
        self.saved, self.owed = step, False
        return checkpoint

    async def begin(self, step: int, weight_version: int, record: dict[str, Any] | None) -> None:
        """Copy the state, and write it while training goes on. `finish` makes the checkpoint of it."""
        pending = await self._describe(step, weight_version, record)
        stage = await asyncio.to_thread(self._parts.checkpoints.stage, step_name(step))
        save_optimizer = self._parts.config.trainer.save_optimizer
        await self._parts.worker.run(self._parts.backend.save_state, stage, save_optimizer, True)
        self._pending, self.saved, self.owed = pending, step, False

    async def finish(self) -> None:
        """Make durable and commit what `begin` began; nothing when there is nothing. A lost one is owed."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        self._activity.set(f"finishing the checkpoint of step {pending.step}")
        try:
            with tracing.span(names.SPAN_TRAINER_CHECKPOINT, {names.ATTRIBUTE_STEP: pending.step}):
                await self._parts.worker.run(self._parts.backend.finish_save)
                checkpoint = await self._publish(pending)
        except OSError as error:
            log.warning("the checkpoint of step %d is lost, the next step writes one: %s", pending.step, error)
            await asyncio.to_thread(self._parts.checkpoints.abandon, step_name(pending.step))
            self.saved, self.owed = -1, True
            return
        await self.commit(checkpoint)

    async def commit(self, checkpoint: Checkpoint) -> None:
        """Only now are the groups of the steps in it settled, and their blobs needed no longer."""
        ledger = await asyncio.to_thread(checkpoint.file(LEDGER_PART).read_text)
        await self._parts.control.commit_checkpoint(checkpoint, ledger)
        await until_available(lambda: self._parts.stream.commit(checkpoint.step), "Redis", self._activity.waiting)
        await self.sweep_blobs()

    async def sweep_blobs(self) -> None:
        """Remove the blobs of all groups that are settled, or were issued again."""
        if self._parts.blobs is not None:
            await until_available(self._parts.blobs.sweep, "Redis", self._activity.waiting)

    async def _describe(self, step: int, weight_version: int, record: dict[str, Any] | None) -> _Pending:
        self._activity.set(f"writing the checkpoint of step {step}")
        snapshot = await until_available(self._parts.ledger.snapshot, "Redis", self._activity.waiting)
        parts = {LEDGER_PART: json.dumps(snapshot, sort_keys=True).encode()}
        meta = {"config_digest": self._parts.config.digest(), "run": self._parts.config.run.name, "record": record}
        return _Pending(step, weight_version, parts, meta)

    async def _try(self, pending: _Pending) -> Checkpoint:
        """One try at a checkpoint. A partial one would take the room that others need, so it is removed."""
        try:
            stage = await asyncio.to_thread(self._parts.checkpoints.stage, step_name(pending.step))
            await self._parts.worker.run(
                self._parts.backend.save_state, stage, self._parts.config.trainer.save_optimizer
            )
            return await self._publish(pending)
        except OSError as error:
            with_place(error, self._parts.checkpoints.root)
            await asyncio.to_thread(self._parts.checkpoints.abandon, step_name(pending.step))
            raise

    async def _publish(self, pending: _Pending) -> Checkpoint:
        return await asyncio.to_thread(
            self._parts.checkpoints.publish_step, pending.step, pending.weight_version, pending.parts, pending.meta
        )
