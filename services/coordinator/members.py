"""Members of a run and their leases: who is alive, who was replaced, who stopped reporting."""

from __future__ import annotations

import asyncio
import logging
import time

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.rpc import errors
from paceline.rpc.checks import checked_name
from paceline.rpc.status import Activity, timestamp
from services.coordinator import runs
from services.coordinator.state import ANSWER_SECONDS, Store, Transaction, View

log = logging.getLogger(__name__)

TICK_SECONDS = 1.0
STALL_SECONDS = 3.0


async def register(change: Transaction, request: pb.RegisterMemberRequest) -> pb.RegisterMemberResponse:
    """Add a member, taking its id over from another incarnation. Aborted for one that was itself replaced."""
    member = request.member
    checked_name(member.member_id, "member.member_id")
    if not member.service or not member.incarnation:
        raise errors.InvalidArgument(f"member {member.member_id!r}: service and incarnation must be set")
    if not 1 <= request.lease_seconds <= 300:
        raise errors.InvalidArgument(f"lease_seconds = {request.lease_seconds:g} must be between 1 and 300")
    await _refuse_superseded(change, member.member_id, member.incarnation)
    held = await change.message(pb.Member, change.keys.members, member.member_id)
    if held is not None and held.incarnation != member.incarnation:
        log.warning("%s at %s takes over from %s", member.member_id, member.address, held.address)
        mark = change.keys.superseded(member.member_id, held.incarnation)
        change.write("SET", mark, member.incarnation, "EX", ANSWER_SECONDS)
    now = time.time()
    stored = pb.Member()
    stored.CopyFrom(member)
    stored.registered_time.CopyFrom(timestamp(now))
    change.write("HSET", change.keys.lease_seconds, member.member_id, request.lease_seconds)
    _renew(change, stored, now + request.lease_seconds)
    change.touch("members")
    return pb.RegisterMemberResponse(member=stored)


async def heartbeat(change: Transaction, request: pb.HeartbeatRequest) -> pb.HeartbeatResponse:
    """Renew a lease. NotFound asks to register again; Aborted says that another incarnation holds the id."""
    member = await change.message(pb.Member, change.keys.members, request.member_id)
    if member is None:
        await _refuse_superseded(change, request.member_id, request.incarnation)
        raise errors.NotFound(
            f"member {request.member_id!r} is not registered in run {change.run_id!r}; register again"
        )
    if member.incarnation != request.incarnation:
        raise errors.Aborted(
            f"member {request.member_id!r} is held by another process, at {member.address}; "
            "this one was replaced and must end"
        )
    if (member.state, member.weight_version) != (request.state, request.weight_version):
        change.touch("members")
    member.state, member.weight_version = request.state, request.weight_version
    member.gauges.clear()
    member.gauges.update(request.gauges)
    seconds = float(await change.read("HGET", change.keys.lease_seconds, request.member_id) or 10)
    _renew(change, member, time.time() + seconds)
    run = await runs.load(change)
    return pb.HeartbeatResponse(
        header=await change.header(), lease_expiry_time=member.lease_expiry_time,
        run_state=run.state if run is not None else pb.RUN_STATE_UNSPECIFIED,
    )  # fmt: skip


async def deregister(change: Transaction, request: pb.DeregisterMemberRequest) -> pb.DeregisterMemberResponse:
    """End the lease of this incarnation; nothing happens when another one holds the id or none does."""
    member = await change.message(pb.Member, change.keys.members, request.member_id)
    if member is not None and member.incarnation == request.incarnation:
        _remove(change, request.member_id)
    return pb.DeregisterMemberResponse()


async def live(view: View, service: str) -> list[pb.Member]:
    """Live members by id; an empty service means all."""
    found = await view.all_messages(pb.Member, view.keys.members)
    return sorted((item for item in found if service in ("", item.service)), key=lambda item: item.member_id)


async def _refuse_superseded(change: Transaction, member_id: str, incarnation: str) -> None:
    if await change.read("EXISTS", change.keys.superseded(member_id, incarnation)):
        raise errors.Aborted(
            f"member {member_id!r}: incarnation {incarnation!r} was replaced by another process and must end"
        )


def _renew(change: Transaction, member: pb.Member, expiry: float) -> None:
    member.lease_expiry_time.CopyFrom(timestamp(expiry))
    change.store(member, change.keys.members, member.member_id)
    change.write("ZADD", change.keys.leases, expiry, member.member_id)


def _remove(change: Transaction, member_id: str) -> None:
    change.write("HDEL", change.keys.members, member_id)
    change.write("HDEL", change.keys.lease_seconds, member_id)
    change.write("ZREM", change.keys.leases, member_id)
    change.touch("members")


class LeaseSweeper:
    """Removes members whose lease ran out.

    When heartbeats could not arrive (this process was down or stalled, or Redis could not be reached), every lease
    first gets its full length again: a member is not to blame for that.
    """

    def __init__(self, store: Store, activity: Activity) -> None:
        self._store = store
        self._activity = activity

    async def run(self) -> None:
        """Sweep for ever, at each expiry and at least once a second."""
        owed = True
        swept = time.monotonic()
        while True:
            owed = owed or time.monotonic() - swept > STALL_SECONDS
            try:
                pause = await self._sweep(owed)
                owed, swept = False, time.monotonic()
                self._activity.set("watching leases")
            except Exception as error:
                known = errors.translate(error)
                if known is None or not known.retryable:
                    raise
                owed, pause = True, TICK_SECONDS
                with self._activity.waiting(known.message):
                    await asyncio.sleep(pause)
                continue
            await asyncio.sleep(pause)

    async def _sweep(self, grace: bool) -> float:
        pause = TICK_SECONDS
        if grace:
            for run_id in await self._store.runs():
                await self._store.change(run_id, _extend)
        for run_id in sorted(self._store.active):
            self._store.active.discard(run_id)
            began = time.monotonic()
            first = await self._store.read(run_id, _first_expiry)
            now = time.time()
            if first is None:
                continue
            self._store.active.add(run_id)
            if first > now:
                pause = min(pause, first - now)
            elif time.monotonic() - began < STALL_SECONDS:
                await self._store.change(run_id, _expire)
        return max(pause, 0.01)


async def _first_expiry(view: View) -> float | None:
    ids = await view.read("ZRANGE", view.keys.leases, 0, 0)
    return float(await view.read("ZSCORE", view.keys.leases, ids[0])) if ids else None


async def _extend(change: Transaction) -> None:
    now = time.time()
    lengths = await change.read("HGETALL", change.keys.lease_seconds)
    for member in await live(change, ""):
        expiry = now + float(lengths.get(member.member_id.encode(), 10))
        if expiry > member.lease_expiry_time.ToNanoseconds() / 1e9:
            _renew(change, member, expiry)
            change.touch("members")


async def _expire(change: Transaction) -> None:
    for item in await change.read("ZRANGEBYSCORE", change.keys.leases, "-inf", time.time()):
        log.warning("lease of %s in run %s ran out", item.decode(), change.run_id)
        _remove(change, item.decode())
