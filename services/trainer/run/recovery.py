"""Where a trainer goes on after a start: newest whole checkpoint, ledger in step with it, recorded steps to replay."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from paceline.ledger import Ledger
from paceline.rpc import errors
from paceline.rpc.patience import until_available
from paceline.rpc.status import Activity
from paceline.stream import SampleStream
from services.trainer.backends.base import TrainBackend
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.run.control import Control
from services.trainer.worker import Worker

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

    def __init__(
        self, worker: Worker, backend: TrainBackend, checkpoints: CheckpointStore, control: Control, ledger: Ledger,
        stream: SampleStream, activity: Activity, load_optimizer: bool = True,
    ) -> None:  # fmt: skip
        self._worker = worker
        self._backend = backend
        self._checkpoints = checkpoints
        self._control = control
        self._ledger = ledger
        self._stream = stream
        self._activity = activity
        self._load_optimizer = load_optimizer

    async def recover(self, config_digest: str) -> StartingPoint:
        """Load the newest whole checkpoint, if any; restore a lost ledger; learn what is to be replayed."""
        self._activity.set("looking for a checkpoint")
        recorded = await self._control.newest_checkpoint()
        checkpoint = await self._worker.run(self._checkpoints.newest)
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
        if checkpoint.meta.get("config_digest") != config_digest:
            log.warning("%s was written under another configuration", checkpoint.directory)
        self._activity.set(f"loading {checkpoint.directory.name}")
        await self._worker.run(self._backend.load_state, checkpoint.directory, self._load_optimizer)
        log.info("loaded %s", checkpoint.directory)
        snapshot = checkpoint.json(LEDGER_PART)
        if await until_available(lambda: self._ledger.restore(snapshot), "Redis", self._activity.waiting):
            log.warning("the ledger was lost and came back from %s", checkpoint.directory)
        replay = await self._rewind(checkpoint.step)
        await self._control.commit_checkpoint(checkpoint, checkpoint.file(LEDGER_PART).read_text())
        await until_available(lambda: self._stream.commit(checkpoint.step), "Redis", self._activity.waiting)
        return StartingPoint(checkpoint.step, checkpoint, replay)

    async def _rewind(self, step: int) -> tuple[int, ...]:
        """Steps to replay. Without a ledger there are none: rollout has not begun."""
        try:
            await until_available(self._stream.attach, "Redis", self._activity.waiting)
        except errors.FailedPrecondition:
            return ()
        account = await until_available(self._ledger.account, "Redis", self._activity.waiting)
        lost = account.committed_step > step
        steps = await until_available(
            lambda: self._stream.rewind(step, reissue_committed=lost), "Redis", self._activity.waiting
        )
        return tuple(sorted(steps))
