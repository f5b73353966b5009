"""What the terminal shows of a run, gathered from its services over gRPC: step records, and each member's status."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc.aio

from paceline.api.common.v1 import status_service_pb2 as status_pb2
from paceline.api.common.v1 import status_service_pb2_grpc as status_grpc
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.rpc.client import open_channel
from paceline.rpc.status import Activity
from paceline.rpc.steps import StepWatch

STATUS_SECONDS = 0.8


@dataclass
class RunView:
    """The newest known of everything, filled by `follow_steps` and `poll_members`."""

    records: dict[int, pb.StepRecord] = field(default_factory=dict)
    evaluations: dict[tuple[str, int], pb.StepRecord] = field(default_factory=dict)
    members: dict[str, pb.Member] = field(default_factory=dict)
    statuses: dict[str, status_pb2.GetStatusResponse | None] = field(default_factory=dict)
    run: pb.Run | None = None

    def values(self, key: str) -> list[float]:
        """A step value over the steps that have it, in order."""
        ordered = (self.records[step].values for step in sorted(self.records))
        return [item[key] for item in ordered if key in item]

    def newest(self) -> pb.StepRecord | None:
        return self.records[max(self.records)] if self.records else None

    def waits(self) -> list[tuple[str, str, str, float]]:
        """(member, part, cause, seconds) of every wait, longest first."""
        found = []
        for member, status in self.statuses.items():
            for item in status.activities if status is not None else ():
                if item.waiting_for:
                    since = item.since_time.seconds + item.since_time.nanos / 1e9
                    found.append((member, item.name, item.waiting_for, max(0.0, time.time() - since)))
        return sorted(found, key=lambda wait: -wait[3])


class Observer:
    """Reads a run through its coordinator, reconnecting for as long as it is asked to."""

    def __init__(self, coordinator_address: str, run_id: str) -> None:
        self.view = RunView()
        self._run_id = run_id
        self._channel = open_channel(coordinator_address)
        self._coordinator: coordinator_grpc.CoordinatorServiceAsyncStub
        self._coordinator = coordinator_grpc.CoordinatorServiceStub(self._channel)  # type: ignore[assignment]
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def close(self) -> None:
        for channel in [self._channel, *self._channels.values()]:
            await channel.close()

    async def follow_steps(self) -> AsyncIterator[pb.StepRecord]:
        """Every record until the run has ended, old ones first; one that a replay changed comes again."""
        watch = StepWatch(self._coordinator, self._run_id, Activity("steps"))
        async for response in watch.until_ended():
            self.view.run = watch.run
            if response.HasField("record") and self._keep(response.record):
                yield response.record

    def _keep(self, record: pb.StepRecord) -> bool:
        """Put a record into the view; False when it was there as it is."""
        if record.kind == pb.RECORD_KIND_EVALUATION:
            known = self.view.evaluations.get((record.name, record.step))
            self.view.evaluations[record.name, record.step] = record
        else:
            known = self.view.records.get(record.step)
            self.view.records[record.step] = record
        return known is None or known.values != record.values

    async def poll_members(self) -> None:
        """Ask the coordinator for members and each member for its status, all within a second."""
        request = pb.ListMembersRequest(run_id=self._run_id)
        try:
            response = await self._coordinator.ListMembers(request, timeout=STATUS_SECONDS)
        except grpc.aio.AioRpcError:
            return
        self.view.members = {member.member_id: member for member in response.members}
        names = list(self.view.members)
        statuses = await asyncio.gather(*(self._status(self.view.members[name].address) for name in names))
        self.view.statuses = dict(zip(names, statuses, strict=True))

    async def _status(self, address: str) -> status_pb2.GetStatusResponse | None:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        stub = status_grpc.StatusServiceStub(self._channels[address])
        try:
            return await stub.GetStatus(status_pb2.GetStatusRequest(), timeout=STATUS_SECONDS)  # type: ignore[misc]
        except grpc.aio.AioRpcError:
            return None
