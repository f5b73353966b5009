"""Ranks that share one policy in megatron-core: matrices, layers, sequences, experts and data. Loads it when used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from torch import Tensor

from paceline.config import ConfigError
from paceline.config.trainer import TrainerConfig
from paceline.plugins import registry
from services.trainer.backends.results import PassResult, StepOutcome
from services.trainer.datum import Group
from services.trainer.ranks.world import World

if TYPE_CHECKING:
    from services.trainer.megatron.backend import Replica
    from services.trainer.objective import Objective

T = TypeVar("T")


@registry("train_backend").register("megatron")
class MegatronBackend:
    """See TrainBackend. A process has one at a time: megatron-core keeps its groups in global variables."""

    kind = "full"

    def __init__(self, path: Path, config: TrainerConfig, seed: int, world: World | None = None) -> None:
        self._world = world or World.single(config.device)
        self._devices, make = _load()
        self.replica: Replica = self._inside(lambda: make(path, config, seed, self._world))
        self.vocabulary = self.replica.stage.vocabulary

    @property
    def updates(self) -> int:
        """See TrainBackend.updates."""
        return self.replica.updates.updates

    def forward(self, groups: Sequence[Group], reference: bool = False) -> list[list[np.ndarray]]:
        """See TrainBackend.forward."""
        return self._inside(lambda: self.replica.forward(groups, reference))

    def forward_backward(
        self, groups: Sequence[Group], objective: Objective, reference: bool = False, every_token: bool = False
    ) -> PassResult:
        """See TrainBackend.forward_backward."""
        return self._inside(lambda: self.replica.forward_backward(groups, objective, reference, every_token))

    def optim_step(self, denominator: float, learning_rate: float) -> StepOutcome:
        """See TrainBackend.optim_step."""
        return self._inside(lambda: self.replica.optim_step(denominator, learning_rate))

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        """See TrainBackend.save_state."""
        self._inside(lambda: self.replica.save_state(directory, optimizer, background))

    def finish_save(self) -> None:
        """See TrainBackend.finish_save."""
        self.replica.finish_save()

    def load_state(self, directory: Path, optimizer: bool = True) -> None:
        """See TrainBackend.load_state."""
        self._inside(lambda: self.replica.load_state(directory, optimizer))

    def weights(self) -> dict[str, Tensor]:
        """See TrainBackend.weights."""
        return self._inside(self.replica.weights)

    def adapter_config(self) -> dict[str, Any] | None:
        """See TrainBackend.adapter_config."""
        return None

    def export(self, directory: Path) -> None:
        """See TrainBackend.export."""
        self._inside(lambda: self.replica.export(directory))

    def _inside(self, work: Callable[[], T]) -> T:
        with self._devices(self._world.device.type):
            return work()


def _load() -> tuple[Any, Any]:
    """Import what needs megatron-core. ConfigError when it is not installed."""
    from services.trainer.megatron.compat import silence_warnings

    silence_warnings()
    try:
        from services.trainer.megatron.backend import Replica
        from services.trainer.megatron.cpu import devices
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("megatron"):
            raise
        raise ConfigError(
            "trainer.backend = 'megatron': megatron-core is not installed; pip install 'paceline[megatron]'"
        ) from error
    return devices, Replica
