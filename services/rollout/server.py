"""RolloutService: decode, call, encode."""

from __future__ import annotations

import asyncio

import grpc.aio

from paceline.api.rollout.v1 import rollout_service_pb2 as pb
from paceline.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from paceline.rpc import errors
from services.rollout.evaluation import Evaluator
from services.rollout.evaluation_store import EvaluationStore
from services.rollout.hold import Hold
from services.rollout.pause_store import PauseStore
from services.rollout.production import Production


class RolloutServer(pb_grpc.RolloutServiceServicer):
    """Pauses, resumes and evaluates."""

    def __init__(
        self,
        production: Production,
        evaluator: Evaluator | None,
        store: EvaluationStore,
        hold: Hold,
        pauses: PauseStore,
    ) -> None:
        self._production = production
        self._evaluator = evaluator
        self._store = store
        self._hold = hold
        self._pauses = pauses
        self._running: dict[str, asyncio.Task[pb.EvaluateResponse]] = {}

    async def PauseProduction(
        self, request: pb.PauseProductionRequest, context: grpc.aio.ServicerContext
    ) -> pb.PauseProductionResponse:
        await self._pauses.pause(request.reason, request.request_id)
        return pb.PauseProductionResponse(num_in_flight=self._production.num_in_flight)

    async def ResumeProduction(
        self, request: pb.ResumeProductionRequest, context: grpc.aio.ServicerContext
    ) -> pb.ResumeProductionResponse:
        await self._pauses.resume(request.request_id)
        return pb.ResumeProductionResponse()

    async def Evaluate(self, request: pb.EvaluateRequest, context: grpc.aio.ServicerContext) -> pb.EvaluateResponse:
        if not request.request_id:
            raise errors.InvalidArgument("request_id is empty; send a fresh one with every new request")
        task = self._running.get(request.request_id)
        if task is None:
            task = asyncio.create_task(self._evaluate(request), name=f"evaluate {request.request_id}")
            self._running[request.request_id] = task
            task.add_done_callback(lambda _: self._running.pop(request.request_id, None))
        # A caller that goes away does not end what another caller, or its own repeat, may be waiting for.
        return await asyncio.shield(task)

    async def close(self) -> None:
        """End evaluations that were asked for."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _evaluate(self, request: pb.EvaluateRequest) -> pb.EvaluateResponse:
        if self._evaluator is None:
            raise errors.FailedPrecondition(
                "this run starts no engine, so nothing can be evaluated on it; `paceline eval` evaluates its "
                "checkpoints on engines of their own"
            )
        answer = await self._store.answer(request.request_id)
        if answer is not None:
            return answer
        with self._hold.during(f"the evaluation {request.name or 'of everything'} that was asked for"):
            results = await self._evaluator.run(request.name, request.weight_version)
        response = pb.EvaluateResponse(results=results)
        await self._store.set_answer(request.request_id, response)
        return response
