"""Where a trainer goes on after a start: newest whole checkpoint, ledger in step with it, recorded steps to replay."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.rpc import errors
from paceline.rpc.patience import until_available
from paceline.rpc.status import Activity
from services.trainer.checkpoint import Checkpoint
from services.trainer.run.parts import Parts

log = logging.getLogger(__name__)

LEDGER_PART = "ledger.json"


@dataclass
class StartingPoint:
    """Where training goes on."""

    step: int = 0
    """Last step that the policy contains."""
    checkpoint: Checkpoint | None = None
    replay: tuple[int, ...] = ()
    """Later steps whose groups are recorded; they are trained again on the same groups."""


class Recovery:
    """Brings policy, ledger and coordinator to one point."""

    def __init__(self, parts: Parts, activity: Activity) -> None:
        self._parts = parts
        self._activity = activity

    async def recover(self) -> StartingPoint:
        """Load the newest whole checkpoint, if any; restore a lost ledger; learn what is to be replayed."""
        self._activity.set("looking for a checkpoint")
        recorded = await self._parts.control.newest_checkpoint()
        checkpoint = await self._parts.worker.run(self._parts.checkpoints.newest)
        if checkpoint is None:
            if recorded is not None:
                log.warning(
                    "the checkpoint of step %d at %s is gone; training starts anew", recorded.step, recorded.uri
                )
            return StartingPoint(0, None, await self._rewind(0))
        if recorded is not None and recorded.step > checkpoint.step:
            log.warning(
                "the newest checkpoint was that of step %d, but %s is the newest whole one on disk; the prompts of the "
                "steps in between are trained again", recorded.step, checkpoint.directory,
            )  # fmt: skip
        if checkpoint.meta.get("config_digest") != self._parts.config.digest():
            log.warning("%s was written under another configuration", checkpoint.directory)
        self._activity.set(f"loading {checkpoint.directory.name}")
        await self._parts.worker.run(
            self._parts.backend.load_state, checkpoint.directory, self._parts.config.trainer.load_optimizer
        )
        log.info("loaded %s", checkpoint.directory)
        snapshot = checkpoint.json(LEDGER_PART)
        if await until_available(lambda: self._parts.ledger.restore(snapshot), "Redis", self._activity.waiting):
            log.warning("the ledger was lost and came back from %s", checkpoint.directory)
        replay = await self._rewind(checkpoint.step)
        await self._parts.control.commit_checkpoint(checkpoint, checkpoint.file(LEDGER_PART).read_text())
        await until_available(lambda: self._parts.stream.commit(checkpoint.step), "Redis", self._activity.waiting)
        return StartingPoint(checkpoint.step, checkpoint, replay)

    async def _rewind(self, step: int) -> tuple[int, ...]:
        """Steps to replay. Without a ledger there are none: rollout has not begun."""
        try:
            await until_available(self._parts.stream.attach, "Redis", self._activity.waiting)
        except errors.FailedPrecondition:
            return ()
        account = await until_available(self._parts.ledger.account, "Redis", self._activity.waiting)
        lost = account.committed_step > step
        steps = await until_available(
            lambda: self._parts.stream.rewind(step, reissue_committed=lost), "Redis", self._activity.waiting
        )
        return tuple(sorted(steps))
