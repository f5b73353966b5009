"""Wires the trainer: `python -m services.trainer RUNFILE`."""

from __future__ import annotations

import os
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import torch

from paceline.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from paceline.blobs import BlobKeeper
from paceline.config import make_plugin
from paceline.ledger import Ledger
from paceline.rpc.membership import RUN_ENDED
from paceline.rpc.runtime import EXIT_RUN_FAILED, ServiceContext, run_service
from paceline.stream import SampleStream
from services.trainer.checkpoint import CheckpointStore
from services.trainer.critic.critic import make_critic
from services.trainer.critic.with_critic import with_critic
from services.trainer.estimation.estimate import check_estimator
from services.trainer.objective import Objective
from services.trainer.ranks.process import LedRanks, run_rank
from services.trainer.run.control import Control
from services.trainer.run.loop import TrainingLoop
from services.trainer.run.metrics import MetricsFile
from services.trainer.run.parts import Parts
from services.trainer.run.primitives import Primitives
from services.trainer.run.publication import Publisher
from services.trainer.server import TrainerServer
from services.trainer.slot import Slot
from services.trainer.step.schedule import learning_rate
from services.trainer.step.step_trainer import StepTrainer
from services.trainer.worker import Worker


async def start(context: ServiceContext) -> None:
    """Offer the service at once; load the model in the background, then train or serve."""
    config = context.config.trainer
    worker = Worker(lambda: torch.set_num_threads(config.threads))
    context.on_stop(worker.close)
    ranks = LedRanks(context, worker)
    checkpoints = CheckpointStore(context.config.directory / "checkpoints", config.keep_checkpoints)
    steps = context.config.run.steps
    server = TrainerServer(
        worker, Slot(owner="the run's training loop" if config.loop else ""), checkpoints,
        context.config.directory / "exports", lambda step: learning_rate(config.optimizer, step, steps),
    )  # fmt: skip
    pb_grpc.add_TrainerServiceServicer_to_server(server, context.rpc.server)
    context.status.facts.update({"device": config.device, "dtype": config.dtype, "model": context.config.model.path})
    table = context.config.weights.transport
    transport = make_plugin("transport", table, "weights.transport", context.config.directory, context.run_id)
    activity = context.status.activity("loop" if config.loop else "primitives")
    control = Control(context.coordinator(), context.run_id, context.incarnation, activity)
    publisher = Publisher(control, transport, table.name, context.config.weights.keep)
    activity.set(f"loading {context.config.model.path}")
    for rank, pid in (await ranks.start()).items():
        context.status.facts[f"rank_{rank}_pid"] = str(pid)
    if config.loop:
        context.spawn("training loop", _loop(context, worker, ranks, server, control, publisher, checkpoints))
    else:
        context.spawn("primitives", _serve(context, worker, ranks, server, control, publisher))


def _loop(
    context: ServiceContext, worker: Worker, ranks: LedRanks, server: TrainerServer, control: Control,
    publisher: Publisher, checkpoints: CheckpointStore,
) -> Coroutine[Any, Any, None]:  # fmt: skip
    """The training loop. Its plug-ins are made at once, so that a wrong option ends the start."""
    config, steps = context.config.trainer, context.config.run.steps
    estimator = make_plugin("estimator", config.estimator, "trainer.estimator")
    check_estimator(estimator, config)
    objective = Objective.from_config(config)
    table = context.config.rollout.blobs
    blobs = make_plugin("blob_store", table, "rollout.blobs", context.config.directory, context.run_id)

    async def train() -> None:
        backend = await ranks.load()
        path, seed = Path(context.config.model.path), context.config.run.seed
        critic = await worker.run(make_critic, path, config, seed, steps)
        backend = with_critic(backend, critic)
        server.backend = backend
        ledger = Ledger(context.redis(), context.run_id)
        parts = Parts(
            config=context.config, status=context.status, worker=worker, backend=backend,
            trainer=StepTrainer(backend, estimator, objective, config, steps, critic), control=control,
            publisher=publisher, checkpoints=checkpoints, ledger=ledger,
            stream=SampleStream(context.redis(), context.run_id, context.config.rollout.buffer_groups),
            metrics=MetricsFile(context.config.directory / "metrics.jsonl"),
            run_ended=lambda: context.membership is not None and context.membership.run_state in RUN_ENDED,
            report=lambda: _report(context), blobs=BlobKeeper(blobs, ledger) if config.routing_replay else None,
        )  # fmt: skip
        outcome = await TrainingLoop(parts).run()
        if outcome is not None and outcome.failed:
            context.request_stop(EXIT_RUN_FAILED, f"the run has failed: {outcome.reason}")

    return train()


async def _serve(
    context: ServiceContext, worker: Worker, ranks: LedRanks, server: TrainerServer, control: Control,
    publisher: Publisher,
) -> None:  # fmt: skip
    """No loop: clients train."""
    backend = await ranks.load()
    primitives = Primitives(backend, worker, control, publisher, context.status, lambda: _report(context))
    server.backend, server.publish = backend, primitives.publish
    await primitives.run(context.config.digest(), context.config.run.steps)


def _report(context: ServiceContext) -> None:
    if context.membership is not None:
        context.membership.report_now()


def main() -> None:
    """This process is rank 0, the service, or one of the others."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # Ranks of torchrun live as long as it does, also when it is killed.
        os.environ["PACELINE_PARENT_PID"] = str(os.getppid())
    if int(os.environ.get("RANK", "0")) > 0:
        run_rank()
    else:
        run_service("trainer", start)


if __name__ == "__main__":
    main()
