"""Streams of changes. Each reads its state from Redis after a bell, so that a restart of this process loses nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.bell import heard
from paceline.rpc.membership import RUN_ENDED
from services.coordinator import members, runs, steps, versions
from services.coordinator.state import Store, View

NOTE_SECONDS = 8.0
"""Silence after which a progress note is sent; the contract promises one at least every 10 s."""
BATCH = 200


async def watch_versions(store: Store, run_id: str, start: int) -> AsyncIterator[pb.WatchVersionsResponse]:
    """Committed versions from `start` on (0: the newest), in order, then live; notes when it is silent."""
    bell = store.bell(run_id, "versions")
    if start == 0:
        start = await store.read(run_id, lambda view: view.number(view.keys.newest)) or 1
    note = True
    while True:
        store.check_open()
        ticket = bell.ticket()

        async def read(
            view: View, start: int = start
        ) -> tuple[pb.ResponseHeader, list[versions.weights_pb2.WeightVersion], bool]:
            ended = await runs.has_ended(view)
            found = await versions.committed_from(view, start, BATCH)
            return await view.header(), found, ended

        header, found, ended = await store.read(run_id, read)
        for version in found:
            yield pb.WatchVersionsResponse(header=header, version=version)
            start = version.weight_version + 1
        if found:
            note = False
            continue
        if ended:
            return
        if note:
            yield pb.WatchVersionsResponse(header=header)
        note = not await heard(ticket, NOTE_SECONDS)


async def watch_members(store: Store, run_id: str, service: str) -> AsyncIterator[pb.WatchMembersResponse]:
    """The live members at once, after every change, and whenever it was silent for a while."""
    bell = store.bell(run_id, "members")
    sent: list[pb.Member] | None = None

    async def read(view: View) -> tuple[pb.ResponseHeader, list[pb.Member], bool]:
        ended = await runs.has_ended(view)
        return await view.header(), await members.live(view, service), ended

    while True:
        store.check_open()
        ticket = bell.ticket()
        header, found, ended = await store.read(run_id, read)
        if sent is None or _visible(found) != sent:
            yield pb.WatchMembersResponse(header=header, members=found)
            sent = _visible(found)
        if ended:
            return
        if not await heard(ticket, NOTE_SECONDS):
            sent = None


def _visible(found: list[pb.Member]) -> list[pb.Member]:
    """What counts as a change: all but the lease and the gauges, which every heartbeat moves."""
    kept = []
    for member in found:
        item = pb.Member()
        item.CopyFrom(member)
        item.ClearField("lease_expiry_time")
        item.ClearField("gauges")
        kept.append(item)
    return kept


async def watch_steps(store: Store, run_id: str, start: int) -> AsyncIterator[pb.WatchStepsResponse]:
    """Stored records from step `start` on, then every record as it comes, also one that replaces an earlier."""
    bell = store.bell(run_id, "steps")
    sequence, fields = await store.read(run_id, lambda view: steps.stored_fields(view, start))
    for first in range(0, len(fields), BATCH):
        async for response in _records(store, run_id, fields[first : first + BATCH]):
            yield response
    state: int | None = None
    while True:
        store.check_open()
        ticket = bell.ticket()
        run = await store.read(run_id, runs.load) or pb.Run(run_id=run_id)
        later = await store.read(run_id, lambda view, after=sequence: steps.fields_after(view, after))
        async for response in _records(store, run_id, [field for _, field in later]):
            yield response
        sequence = later[-1][0] if later else sequence
        if run.state != state:
            header = await store.read(run_id, lambda view: view.header())
            yield pb.WatchStepsResponse(header=header, run=run)
            state = run.state
        if run.state in RUN_ENDED:
            return
        if not await heard(ticket, NOTE_SECONDS):
            state = None


async def _records(store: Store, run_id: str, fields: list[bytes]) -> AsyncIterator[pb.WatchStepsResponse]:
    async def read(view: View) -> tuple[pb.ResponseHeader, list[pb.StepRecord]]:
        return await view.header(), await view.messages(pb.StepRecord, view.keys.steps, fields)

    if not fields:
        return
    header, found = await store.read(run_id, read)
    for item in found:
        yield pb.WatchStepsResponse(header=header, record=item)
