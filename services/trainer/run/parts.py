"""What one run's training works with: loop, saver and recovery take their collaborators from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from paceline.blobs import BlobKeeper
from paceline.config import RunFile
from paceline.ledger import Ledger
from paceline.rpc.status import StatusBoard
from paceline.stream import SampleStream
from services.trainer.backends.base import TrainBackend
from services.trainer.checkpoint import CheckpointStore
from services.trainer.run.control import Control
from services.trainer.run.metrics import MetricsFile
from services.trainer.run.publication import Publisher
from services.trainer.step.step_trainer import StepTrainer
from services.trainer.worker import Worker


@dataclass
class Parts:
    """Collaborators of the training loop."""

    config: RunFile
    status: StatusBoard
    worker: Worker
    backend: TrainBackend
    trainer: StepTrainer
    control: Control
    publisher: Publisher
    checkpoints: CheckpointStore
    ledger: Ledger
    stream: SampleStream
    metrics: MetricsFile
    run_ended: Callable[[], bool]
    """Whether the coordinator said that the run is over."""
    report: Callable[[], None]
    """Tell the coordinator about a change of state now."""
    blobs: BlobKeeper | None = None
    """Of samples that have any."""
