"""Barriers: all named members have come so far. Who entered is stored, so that a reconnection loses nothing."""

from __future__ import annotations

import time

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.bell import heard
from paceline.rpc import errors
from paceline.rpc.checks import checked_name
from services.coordinator import members
from services.coordinator.state import Store, Transaction, View

RETAINED_SECONDS = 86_400


async def enter(store: Store, request: pb.EnterBarrierRequest, seconds: float) -> pb.EnterBarrierResponse:
    """Enter and wait up to `seconds` for the others. DeadlineExceeded names who is missing."""
    checked_name(request.barrier, "barrier")
    checked_name(request.member_id, "member_id")
    if request.num_participants < 1:
        raise errors.InvalidArgument(f"num_participants = {request.num_participants} must be at least 1")
    deadline = time.monotonic() + seconds

    async def add(change: Transaction) -> None:
        await _add(change, request)

    async def entered(view: View) -> list[str]:
        names = await view.read("HKEYS", view.keys.barrier(request.barrier))
        return sorted(name.decode() for name in names if name)

    await store.change(request.run_id, add)
    bell = store.bell(request.run_id, "barriers")
    while True:
        store.check_open()
        ticket = bell.ticket()
        names = await store.read(request.run_id, entered)
        if len(names) >= request.num_participants:
            header = await store.read(request.run_id, lambda view: view.header())
            return pb.EnterBarrierResponse(header=header, member_ids=names)
        if not await heard(ticket, min(1.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
            raise await _missing(store, request, names)


async def _add(change: Transaction, request: pb.EnterBarrierRequest) -> None:
    key = change.keys.barrier(request.barrier)
    expected, entered = await change.read("HMGET", key, "", request.member_id)
    if expected is not None and int(expected) != request.num_participants:
        raise errors.InvalidArgument(
            f"barrier {request.barrier!r} is for {int(expected)} participants, not {request.num_participants}; "
            "use another name for another use"
        )
    if entered is None:
        change.write("HSET", key, "", request.num_participants, request.member_id, time.time())
        change.write("EXPIRE", key, RETAINED_SECONDS)
        change.touch("barriers")


async def _missing(store: Store, request: pb.EnterBarrierRequest, entered: list[str]) -> errors.DeadlineExceeded:
    alive = await store.read(request.run_id, lambda view: members.live(view, ""))
    absent = [item.member_id for item in alive if item.member_id not in entered]
    count = request.num_participants - len(entered)
    return errors.DeadlineExceeded(
        f"barrier {request.barrier!r}: {count} of {request.num_participants} missing; entered: {', '.join(entered)}; "
        f"live members that have not entered: {', '.join(absent) or 'none'}"
    )
