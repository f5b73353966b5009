"""TrainerService over gRPC: the primitives for clients other than the training loop."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from paceline import arrays
from paceline.api.trainer.v1 import trainer_service_pb2 as pb
from paceline.api.trainer.v1 import trainer_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.rpc import errors
from paceline.rpc.checks import checked_name
from services.trainer.backends.base import TrainBackend
from services.trainer.checkpoint import Checkpoint, CheckpointStore
from services.trainer.datum import InvalidDatum
from services.trainer.decoding import decode_data, make_objective
from services.trainer.exporting import export_run
from services.trainer.room import with_place, with_room
from services.trainer.slot import Slot
from services.trainer.worker import Worker

T = TypeVar("T")

_REMEMBERED = 1024


class TrainerServer(pb_grpc.TrainerServiceServicer):
    """Decode, check, call the backend in the torch thread, encode. `backend` is None until the model is loaded."""

    def __init__(
        self, worker: Worker, slot: Slot, checkpoints: CheckpointStore, exports: Path, rate: Callable[[int], float]
    ) -> None:
        self.backend: TrainBackend | None = None
        self._worker = worker
        self._slot = slot
        self._checkpoints = checkpoints
        self._exports = exports
        self._rate = rate
        self.publish: Callable[[], Awaitable[WeightVersion]] | None = None
        """Publishes the slot's weights. None while nobody may ask for that."""
        self._answers: OrderedDict[str, asyncio.Future[Any]] = OrderedDict()

    async def Forward(self, request: pb.ForwardRequest, context: Any) -> pb.ForwardResponse:
        self._slot.check_name(request.slot)
        backend = self._loaded()
        data = decode_data(request.data, backend.vocabulary)
        try:
            (logprobs,) = await self._worker.run(backend.forward, [data])
        except InvalidDatum as error:
            # With routing replay a datum needs a routing, which clients cannot send.
            raise errors.InvalidArgument(str(error)) from error
        return pb.ForwardResponse(policy_logprobs=[arrays.to_wire(item) for item in logprobs])

    async def ForwardBackward(self, request: pb.ForwardBackwardRequest, context: Any) -> Any:
        backend = self._changing(request, "ForwardBackward")
        data = decode_data(request.data, backend.vocabulary)
        objective = make_objective(request.loss, dict(request.loss_parameters), data)

        async def body() -> pb.ForwardBackwardResponse:
            result = await self._worker.run(backend.forward_backward, [data], objective, False, True)
            metrics = {f"{name}:sum": value for name, value in result.metrics.items() if np.isfinite(value)}
            metrics["num_tokens:sum"] = float(result.num_tokens)
            return pb.ForwardBackwardResponse(
                loss_sum=result.loss_sum, metrics=metrics,
                policy_logprobs=[arrays.to_wire(item) for item in result.policy_logprobs[0]],
            )  # fmt: skip

        return await self._once(request.request_id, body)

    async def OptimStep(self, request: pb.OptimStepRequest, context: Any) -> Any:
        backend = self._changing(request, "OptimStep")
        if not (request.denominator > 0 and np.isfinite(request.denominator)):
            raise errors.InvalidArgument(f"denominator {request.denominator} must be positive and finite")

        async def body() -> pb.OptimStepResponse:
            rate = request.learning_rate if request.learning_rate > 0 else self._rate(backend.updates + 1)
            outcome = await self._worker.run(backend.optim_step, request.denominator, rate)
            return pb.OptimStepResponse(
                stepped=outcome.stepped, step=backend.updates, grad_norm=outcome.grad_norm, learning_rate=rate
            )

        return await self._once(request.request_id, body)

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Any) -> Any:
        backend = self._changing(request, "SaveCheckpoint")
        checked_name(request.name, "name")
        if request.name.startswith("step-") or request.name == "latest":
            raise errors.InvalidArgument(f"name {request.name!r} is kept for the training loop; choose another")

        async def body() -> pb.SaveCheckpointResponse:
            saved = await with_room(lambda: self._save(backend, request.name), f"checkpoint {request.name!r}")
            return pb.SaveCheckpointResponse(uri=str(saved.directory), digest=saved.digest)

        return await self._once(request.request_id, body)

    async def LoadCheckpoint(self, request: pb.LoadCheckpointRequest, context: Any) -> Any:
        backend = self._changing(request, "LoadCheckpoint")

        async def body() -> pb.LoadCheckpointResponse:
            checkpoint = await asyncio.to_thread(self._checkpoints.open, request.name)
            await self._worker.run(backend.load_state, checkpoint.directory)
            return pb.LoadCheckpointResponse(step=checkpoint.step)

        return await self._once(request.request_id, body)

    async def PublishWeights(self, request: pb.PublishWeightsRequest, context: Any) -> Any:
        self._changing(request, "PublishWeights")
        publish = self.publish
        if publish is None:
            raise errors.Unavailable("the trainer is being started; try again", 1.0)

        async def body() -> pb.PublishWeightsResponse:
            version = await publish()
            return pb.PublishWeightsResponse(
                weight_version=version.weight_version, step=version.step, digest=version.digest
            )

        return await self._once(request.request_id, body)

    async def ExportModel(self, request: pb.ExportModelRequest, context: Any) -> Any:
        backend = self._changing(request, "ExportModel")
        checked_name(request.name, "name")

        async def body() -> pb.ExportModelResponse:
            target = await with_room(
                lambda: self._worker.run(export_run, backend, self._exports / request.name, backend.updates, 0),
                f"the exported model {request.name!r}",
            )  # fmt: skip
            return pb.ExportModelResponse(uri=str(target))

        return await self._once(request.request_id, body)

    async def _save(self, backend: TrainBackend, name: str) -> Checkpoint:
        try:
            stage = await asyncio.to_thread(self._checkpoints.stage, name)
            await self._worker.run(backend.save_state, stage)
            return await asyncio.to_thread(self._checkpoints.publish, name, backend.updates, 0, {}, {})
        except OSError as error:
            with_place(error, self._checkpoints.root)
            await asyncio.to_thread(self._checkpoints.abandon, name)
            raise

    def _loaded(self) -> TrainBackend:
        if self.backend is None:
            raise errors.Unavailable("the model is still being loaded; try again", 1.0)
        return self.backend

    def _changing(self, request: Any, call: str) -> TrainBackend:
        if not request.request_id:
            raise errors.InvalidArgument(f"{call} needs a request_id, which makes a repeat harmless")
        self._slot.check_name(request.slot)
        self._slot.check_free(call)
        return self._loaded()

    async def _once(self, request_id: str, body: Callable[[], Awaitable[T]]) -> T:
        """Run `body` for the first request of an id; a repeat, also one that comes while it runs, gets its answer."""
        known = self._answers.get(request_id)
        if known is None:
            known = asyncio.ensure_future(body())
            self._answers[request_id] = known
            known.add_done_callback(lambda done: self._forget_failed(request_id, done))
            while len(self._answers) > _REMEMBERED:
                self._answers.popitem(last=False)
        # Shielded: the caller's deadline must not stop work that a repeat will ask for.
        return await asyncio.shield(known)

    def _forget_failed(self, request_id: str, done: asyncio.Future[Any]) -> None:
        if done.cancelled() or done.exception() is not None:
            self._answers.pop(request_id, None)
