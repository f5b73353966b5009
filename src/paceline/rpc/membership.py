"""A process's place in its run: registered with the coordinator under a lease that a heartbeat renews."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc.aio

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.bell import heard
from paceline.ids import new_id
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard

log = logging.getLogger(__name__)

CALL_SECONDS = 5.0
RUN_ENDED = (pb.RUN_STATE_FINISHED, pb.RUN_STATE_FAILED, pb.RUN_STATE_STOPPED)
"""States of a run that has ended."""


class TakenOver(RuntimeError):
    """Another process registered under this member id; this one must end."""


class Membership:
    """Keeps a member registered. `run` raises TakenOver when another process took the member id."""

    def __init__(
        self, stub: pb_grpc.CoordinatorServiceAsyncStub, board: StatusBoard, address: str, labels: dict[str, str],
        lease_seconds: float = 10.0,
    ) -> None:  # fmt: skip
        self._stub = stub
        self._board = board
        self._address = address
        self.labels = labels
        self._lease_seconds = lease_seconds
        self._changed = asyncio.Event()
        self._registered = False
        self.run_state = pb.RUN_STATE_UNSPECIFIED

    def report_now(self) -> None:
        """Send the next heartbeat at once: state or weight version changed."""
        self._changed.set()

    async def run(self) -> None:
        """Register, then heartbeat three times a lease, registering again when the coordinator forgot us."""
        activity = self._board.activity("membership")
        while True:
            try:
                if not self._registered:
                    await self._register()
                await self._heartbeat()
                activity.set("registered")
                await self._pause(self._lease_seconds / 3)
            except errors.Aborted as error:
                raise TakenOver(str(error)) from error
            except errors.NotFound:
                self._registered = False
                await self._pause(0.2)
            except errors.PacelineError as error:
                with activity.waiting(f"coordinator: {error.message}"):
                    await self._pause(0.5)

    async def leave(self) -> None:
        """Say how this process ended, and end the lease now. A coordinator that is away lets it run out."""
        request = pb.DeregisterMemberRequest(
            request_id=new_id(), run_id=self._board.run_id, member_id=self._board.member_id,
            incarnation=self._board.incarnation,
        )  # fmt: skip
        try:
            if self._registered:
                await self._stub.Heartbeat(self._beat(), timeout=1.0)
            await self._stub.DeregisterMember(request, timeout=1.0)
        except grpc.aio.AioRpcError as error:
            log.info("left without deregistering: %s", error.code().name)

    async def _pause(self, seconds: float) -> None:
        await heard(self._changed, seconds)
        self._changed.clear()

    async def _register(self) -> None:
        board = self._board
        member = pb.Member(
            member_id=board.member_id, service=board.service, address=self._address, incarnation=board.incarnation,
            state=board.state, weight_version=board.weight_version, labels=self.labels,
        )  # fmt: skip
        request = pb.RegisterMemberRequest(
            request_id=new_id(), run_id=board.run_id, member=member, lease_seconds=self._lease_seconds
        )
        try:
            await self._stub.RegisterMember(request, timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        self._registered = True

    async def _heartbeat(self) -> None:
        began = time.monotonic()
        try:
            response = await self._stub.Heartbeat(self._beat(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        self.run_state = response.run_state
        if time.monotonic() - began > 1:
            log.warning("heartbeat took %.1f s", time.monotonic() - began)

    def _beat(self) -> pb.HeartbeatRequest:
        board = self._board
        return pb.HeartbeatRequest(
            run_id=board.run_id, member_id=board.member_id, incarnation=board.incarnation, state=board.state,
            weight_version=board.weight_version, gauges=board.gauges,
        )  # fmt: skip
