"""CoordinatorService: decodes a request, calls the domain, encodes the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.rpc import errors
from paceline.rpc.checks import checked_name
from paceline.rpc.deadlines import own_seconds
from services.coordinator import barriers, members, runs, steps, versions, watches
from services.coordinator.state import Store, Transaction, View

BARRIER_SECONDS = 60.0
"""How long a barrier waits for a caller without a deadline."""


class CoordinatorServer(pb_grpc.CoordinatorServiceServicer):
    """Every RPC of coordinator_service.proto over one store."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def CreateRun(self, request: pb.CreateRunRequest, context: Any) -> pb.CreateRunResponse:
        await self._store.know_run(request.run_id)
        return await self._store.answer(request, pb.CreateRunResponse, lambda change: runs.create(change, request))

    async def GetRun(self, request: pb.GetRunRequest, context: Any) -> pb.GetRunResponse:
        async def read(view: View) -> pb.GetRunResponse | None:
            run = await runs.load(view)
            return pb.GetRunResponse(header=await view.header(), run=run) if run is not None else None

        return await self._store.read(request.run_id, read) or await self._no_run(request.run_id)

    async def FinishRun(self, request: pb.FinishRunRequest, context: Any) -> pb.FinishRunResponse:
        async def body(change: Transaction) -> pb.FinishRunResponse:
            return await runs.finish(change, request) or await self._no_run(request.run_id)

        return await self._store.answer(request, pb.FinishRunResponse, body)

    async def RegisterMember(self, request: pb.RegisterMemberRequest, context: Any) -> pb.RegisterMemberResponse:
        await self._store.know_run(request.run_id)
        return await self._store.answer(
            request, pb.RegisterMemberResponse, lambda change: members.register(change, request)
        )

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Any) -> pb.HeartbeatResponse:
        return await self._store.change(request.run_id, lambda change: members.heartbeat(change, request))

    async def DeregisterMember(self, request: pb.DeregisterMemberRequest, context: Any) -> pb.DeregisterMemberResponse:
        return await self._store.answer(
            request, pb.DeregisterMemberResponse, lambda change: members.deregister(change, request)
        )

    async def ListMembers(self, request: pb.ListMembersRequest, context: Any) -> pb.ListMembersResponse:
        async def read(view: View) -> pb.ListMembersResponse:
            return pb.ListMembersResponse(header=await view.header(), members=await members.live(view, request.service))

        return await self._store.read(request.run_id, read)

    async def WatchMembers(
        self, request: pb.WatchMembersRequest, context: Any
    ) -> AsyncIterator[pb.WatchMembersResponse]:
        checked_name(request.run_id, "run_id")
        async for response in watches.watch_members(self._store, request.run_id, request.service):
            yield response

    async def AcquireTrainer(self, request: pb.AcquireTrainerRequest, context: Any) -> pb.AcquireTrainerResponse:
        return await self._store.answer(
            request, pb.AcquireTrainerResponse, lambda change: versions.acquire(change, request)
        )

    async def PrepareVersion(self, request: pb.PrepareVersionRequest, context: Any) -> pb.PrepareVersionResponse:
        return await self._store.answer(
            request, pb.PrepareVersionResponse, lambda change: versions.prepare(change, request)
        )

    async def CommitVersion(self, request: pb.CommitVersionRequest, context: Any) -> pb.CommitVersionResponse:
        return await self._store.answer(
            request, pb.CommitVersionResponse, lambda change: versions.commit(change, request)
        )

    async def ReportWeights(self, request: pb.ReportWeightsRequest, context: Any) -> pb.ReportWeightsResponse:
        async def body(change: Transaction) -> pb.ReportWeightsResponse:
            await versions.report(change, request.weights)
            return pb.ReportWeightsResponse()

        return await self._store.answer(request, pb.ReportWeightsResponse, body)

    async def GetVersion(self, request: pb.GetVersionRequest, context: Any) -> pb.GetVersionResponse:
        return await self._store.read(request.run_id, lambda view: versions.get(view, request.weight_version))

    async def WatchVersions(
        self, request: pb.WatchVersionsRequest, context: Any
    ) -> AsyncIterator[pb.WatchVersionsResponse]:
        checked_name(request.run_id, "run_id")
        if request.start_version < 0:
            raise errors.InvalidArgument(f"start_version = {request.start_version} is negative; 0 means the newest")
        async for response in watches.watch_versions(self._store, request.run_id, request.start_version):
            yield response

    async def CommitCheckpoint(self, request: pb.CommitCheckpointRequest, context: Any) -> pb.CommitCheckpointResponse:
        return await self._store.answer(
            request, pb.CommitCheckpointResponse, lambda change: steps.commit_checkpoint(change, request)
        )

    async def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> pb.ListCheckpointsResponse:
        return await self._store.read(request.run_id, steps.checkpoints)

    async def RecordStep(self, request: pb.RecordStepRequest, context: Any) -> pb.RecordStepResponse:
        return await self._store.answer(request, pb.RecordStepResponse, lambda change: steps.record(change, request))

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: Any) -> AsyncIterator[pb.WatchStepsResponse]:
        checked_name(request.run_id, "run_id")
        async for response in watches.watch_steps(self._store, request.run_id, request.start_step):
            yield response

    async def EnterBarrier(self, request: pb.EnterBarrierRequest, context: Any) -> pb.EnterBarrierResponse:
        seconds = own_seconds(context.time_remaining(), BARRIER_SECONDS)
        return await barriers.enter(self._store, request, seconds)

    async def _no_run(self, run_id: str) -> Any:
        raise await runs.missing(self._store, run_id)
