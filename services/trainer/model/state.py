"""The state of a policy on disk: masters, moments, progress and random numbers, a folder or file each.

Learning rates are a function of the step, so progress holds all of the schedule. The optimizer's moments may be left
out or left unread; progress never is.
"""

from __future__ import annotations

import json
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from paceline.rpc import errors
from services.trainer.model.shards import Piece, PieceReader, file_name, serialize

log = logging.getLogger(__name__)

PARAMETERS, OPTIMIZER, RNG, PROGRESS = "parameters", "optimizer", "rng", "progress.json"


@dataclass
class StateCopy:
    """One rank's part of a state."""

    parameters: dict[str, Tensor]
    moments: dict[str, Tensor]
    pieces: dict[str, Piece]
    """For each cut tensor of both."""
    progress: dict[str, Any]
    rng: dict[str, Tensor] = field(default_factory=dict)
    rank: int = 0
    writes_tensors: bool = True

    def write(self, directory: Path, optimizer: bool = True) -> None:
        """Write the rank's files. One that holds a replica of another's pieces leaves them to that one."""
        if self.writes_tensors:
            _place(directory / PARAMETERS / file_name(self.rank), serialize(self.parameters, self.pieces))
            if optimizer:
                _place(directory / OPTIMIZER / file_name(self.rank), serialize(self.moments, self.pieces))
        _place(directory / RNG / file_name(self.rank), safetensors.torch.save(self.rng))
        if self.rank == 0:
            _place(directory / PROGRESS, json.dumps(self.progress, sort_keys=True).encode())

    def detached(self, optimizer: bool) -> StateCopy:
        """A copy of what `write` will write, on the host, that later updates do not change."""
        parameters = self.parameters if self.writes_tensors else {}
        moments = self.moments if self.writes_tensors and optimizer else {}
        return replace(self, parameters=_copied(parameters), moments=_copied(moments))


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: item.detach().to("cpu", copy=True) for name, item in tensors.items()}


def _place(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def read_progress(directory: Path) -> dict[str, Any]:
    """How far the state had come. DataLoss when it is not there whole."""
    try:
        return json.loads((directory / PROGRESS).read_bytes())
    except (OSError, ValueError) as error:
        raise errors.DataLoss(f"{directory / PROGRESS} cannot be read: {error}") from error


def open_optimizer(directory: Path, wanted: bool) -> PieceReader | None:
    """The moments, or None when they are not wanted or were not saved."""
    if wanted and not (directory / OPTIMIZER).is_dir():
        log.warning("%s was saved without the optimizer; its moments start anew", directory)
        return None
    return PieceReader(directory / OPTIMIZER) if wanted else None


def rng_state(device: torch.device) -> dict[str, Tensor]:
    """States of the random generators that a pass may use."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def restore_rng(directory: Path, rank: int, device: torch.device) -> None:
    """Set the generators of a rank to what they were, where a rank of that number wrote a state."""
    path = directory / RNG / file_name(rank)
    if not path.is_file():
        log.warning("%s has no random state of rank %d; dropout draws from the seed", directory, rank)
        return
    states = safetensors.torch.load_file(path)
    torch.set_rng_state(states["cpu"].clone())
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"].clone(), device)


class BackgroundSave:
    """At most one write in a thread of its own; `finish` waits for it and raises its error."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._running: Future[None] | None = None

    def save(self, copy: StateCopy, directory: Path, optimizer: bool, background: bool) -> None:
        """Write now, or copy now and write later."""
        self.finish()
        if background:
            self._running = self._executor.submit(copy.detached(optimizer).write, directory, optimizer)
        else:
            copy.write(directory, optimizer)

    def finish(self) -> None:
        """Return when nothing is being written any more."""
        running, self._running = self._running, None
        if running is not None:
            running.result()
