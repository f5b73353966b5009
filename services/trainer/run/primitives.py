"""A trainer without a training loop: clients of TrainerService own the slot, and decide when weights are published."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard
from services.trainer.backends.base import TrainBackend
from services.trainer.run.control import Control
from services.trainer.run.publication import Publisher, Snapshot
from services.trainer.worker import Worker

log = logging.getLogger(__name__)


class Primitives:
    """Serves until the run is ended. `report` tells the coordinator about a change of state now."""

    def __init__(
        self, backend: TrainBackend, worker: Worker, control: Control, publisher: Publisher, status: StatusBoard,
        report: Callable[[], None],
    ) -> None:  # fmt: skip
        self._backend = backend
        self._worker = worker
        self._control = control
        self._publisher = publisher
        self._status = status
        self._activity = status.activity("primitives")
        self._report = report
        self._turn = asyncio.Lock()
        self._ready = False

    async def run(self, config_digest: str, num_steps: int) -> None:
        """Take the run over, see that engines have something to serve, and stay until the run is ended."""
        await self._control.ensure_run(config_digest, num_steps)
        newest = await self._control.acquire()
        if newest is not None and await asyncio.to_thread(self._publisher.holds, newest):
            self._status.weight_version = newest.weight_version
            if newest.step:
                log.warning(
                    "the trainer holds the model of the run file, while version %d has %d steps of training; clients "
                    "go on by LoadCheckpoint", newest.weight_version, newest.step,
                )  # fmt: skip
        else:
            # A first one, or the bytes of the last one are gone, as memory is after a stop.
            await self._publish()
        self._ready = True
        self._become("READY")
        self._activity.set("serving clients of TrainerService")
        await self._control.wait_for_end()
        self._activity.set("done")
        self._become("DONE")

    async def publish(self) -> WeightVersion:
        """Publish the slot's weights. Unavailable until the trainer is ready."""
        if not self._ready:
            raise errors.Unavailable("the trainer is being started; try again", 1.0)
        return await self._publish()

    async def _publish(self) -> WeightVersion:
        async with self._turn:
            snapshot = await self._worker.run(self._take)
            self._activity.set(f"publishing the weights of step {snapshot.step}")
            try:
                version = await self._publisher.publish(snapshot)
            finally:
                self._activity.set("serving clients of TrainerService")
            self._status.weight_version = version.weight_version
            self._report()
            return version

    def _take(self) -> Snapshot:
        return Snapshot.take(self._backend, self._backend.updates)

    def _become(self, state: str) -> None:
        self._status.state = state
        self._report()
