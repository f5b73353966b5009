"""Wires the trainer: `python -m services.trainer RUNFILE`."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from paceline.config import make_plugin
from paceline.ledger import Ledger
from paceline.plugins import registry
from paceline.rpc.membership import RUN_ENDED
from paceline.rpc.runtime import ServiceContext, run_service
from paceline.stream import SampleStream
from services.trainer.backends.base import TrainBackend
from services.trainer.checkpoint import CheckpointStore
from services.trainer.control import Control
from services.trainer.critic.critic import make_critic
from services.trainer.critic.with_critic import with_critic
from services.trainer.estimation import check_estimator
from services.trainer.loop import Parts, TrainingLoop
from services.trainer.metrics import MetricsFile
from services.trainer.objective import Objective
from services.trainer.publication import Publisher
from services.trainer.schedule import learning_rate
from services.trainer.server import TrainerServer
from services.trainer.slot import Slot
from services.trainer.step import StepTrainer
from services.trainer.worker import Worker


async def start(context: ServiceContext) -> None:
    """Offer the service at once, and train in the background."""
    config = context.config.trainer
    estimator = make_plugin("estimator", config.estimator, "trainer.estimator")
    check_estimator(estimator, config)
    objective = Objective.from_config(config)
    table = context.config.weights.transport
    transport = make_plugin("transport", table, "weights.transport", context.config.directory, context.run_id)
    worker = Worker(lambda: torch.set_num_threads(config.threads))
    context.on_stop(worker.close)
    checkpoints = CheckpointStore(context.config.directory / "checkpoints", config.keep_checkpoints)
    steps = context.config.run.steps
    slot = Slot(owner="the run's training loop")
    server = TrainerServer(
        worker, slot, checkpoints, context.config.directory / "exports",
        lambda step: learning_rate(config.optimizer, step, steps),
    )  # fmt: skip
    pb_grpc.add_TrainerServiceServicer_to_server(server, context.rpc.server)
    context.status.facts.update({"device": config.device, "dtype": config.dtype, "model": context.config.model.path})

    async def train() -> None:
        activity = context.status.activity("loop")
        activity.set(f"loading {context.config.model.path}")
        backend_class = registry("train_backend").load(config.backend)
        path = Path(context.config.model.path)
        backend: TrainBackend = await worker.run(backend_class, path, config, context.config.run.seed)
        critic = await worker.run(make_critic, path, config, context.config.run.seed, steps)
        backend = with_critic(backend, critic)
        server.backend = backend
        control = Control(context.coordinator(), context.run_id, context.incarnation, activity)
        capacity = context.config.rollout.buffer_groups
        parts = Parts(
            config=context.config, status=context.status, worker=worker, backend=backend,
            trainer=StepTrainer(backend, estimator, objective, config, steps, critic), control=control,
            publisher=Publisher(control, transport, table.name, context.config.weights.keep), checkpoints=checkpoints,
            ledger=Ledger(context.redis(), context.run_id),
            stream=SampleStream(context.redis(), context.run_id, capacity),
            metrics=MetricsFile(context.config.directory / "metrics.jsonl"),
            run_ended=lambda: context.membership is not None and context.membership.run_state in RUN_ENDED,
            report=lambda: context.membership.report_now() if context.membership is not None else None,
        )  # fmt: skip
        await TrainingLoop(parts).run()

    context.spawn("training loop", train())


if __name__ == "__main__":
    run_service("trainer", start)
