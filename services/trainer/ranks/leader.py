"""Rank 0's backend: whatever is asked of it, all ranks do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from services.trainer.backends.base import PassResult, StepOutcome, TrainBackend
from services.trainer.datum import Group
from services.trainer.objective import Objective
from services.trainer.ranks.commands import encode
from services.trainer.ranks.together import together
from services.trainer.ranks.world import World

STOP = "stop"


class Leader:
    """See TrainBackend. Every call goes to the other ranks first, then runs here, and ends when it ended everywhere."""

    def __init__(self, backend: TrainBackend, world: World) -> None:
        self._backend = backend
        self._world = world
        self.kind = backend.kind
        self.vocabulary = backend.vocabulary

    @property
    def updates(self) -> int:
        """See TrainBackend.updates."""
        return self._backend.updates

    def run(self, call: str, *arguments: Any) -> Any:
        """The result of a method of the backend, called on all ranks."""
        self._world.broadcast(encode(call, arguments))
        return together(self._world, lambda: getattr(self._backend, call)(*arguments))

    def stop(self) -> None:
        """Let the other ranks end. No call may follow."""
        self._world.broadcast(encode(STOP, ()))

    def forward(self, groups: Sequence[Group], reference: bool = False) -> list[list[np.ndarray]]:
        """See TrainBackend.forward."""
        return self.run("forward", groups, reference)

    def forward_backward(
        self, groups: Sequence[Group], objective: Objective, reference: bool = False, every_token: bool = False
    ) -> PassResult:
        """See TrainBackend.forward_backward."""
        return self.run("forward_backward", groups, objective, reference, every_token)

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """See TrainBackend.optim_step."""
        return self.run("optim_step", denominator, learning_rate)

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        """See TrainBackend.save_state."""
        self.run("save_state", directory.absolute(), optimizer, background)

    def finish_save(self) -> None:
        """See TrainBackend.finish_save."""
        self.run("finish_save")

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """See TrainBackend.load_state."""
        self.run("load_state", directory.absolute(), optimizer)

    def weights(self) -> dict[str, Any]:
        """See TrainBackend.weights."""
        return self.run("weights")

    def adapter_config(self) -> dict[str, Any] | None:
        """See TrainBackend.adapter_config. Needs no other rank."""
        return self._backend.adapter_config()

    def export(self, directory: Path) -> None:
        """See TrainBackend.export."""
        self.run("export", directory.absolute())
