"""Follows the run: step records and members from the coordinator, the status of each process, the ledger account.

Each loop goes on for ever; what cannot be reached is written down as such and tried again.
"""

from __future__ import annotations

import asyncio
import json
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import redis.exceptions

from paceline.api.common.v1 import status_service_pb2 as status_pb
from paceline.api.common.v1 import status_service_pb2_grpc as status_grpc
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from paceline.rpc import errors
from paceline.rpc.client import open_channel
from paceline.rpc.following import STREAM_ENDED
from paceline.rpc.members import MemberWatch
from paceline.rpc.status import Activity, StatusBoard
from paceline.rpc.steps import StepWatch
from services.dashboard.state import FollowedMember, LiveState, Source
from services.dashboard.store import FleetSample, StepRow, Store

STATUS_SECONDS = 1.0
_BATCH = 500
_KINDS = {pb.RECORD_KIND_TRAIN: "train", pb.RECORD_KIND_EVALUATION: "evaluation"}


class Follower:
    """Keeps `state` and `store` up to date. Run each `follow_*` and `poll_*` as a task of its own."""

    def __init__(
        self, state: LiveState, store: Store, stub: pb_grpc.CoordinatorServiceAsyncStub, board: StatusBoard,
        every_seconds: float = 1.0,
    ) -> None:  # fmt: skip
        self._state = state
        self._store = store
        self._stub = stub
        self._board = board
        self._every = every_seconds
        self._channels: dict[str, grpc.aio.Channel] = {}

    def add_coordinator(self, address: str) -> None:
        """Poll the coordinator too, which is no member of its own."""
        member = pb.Member(member_id="coordinator", service="coordinator", address=address, state="READY")
        self._state.members["coordinator"] = FollowedMember(member, Source("coordinator"))

    async def follow_steps(self) -> None:
        """Step records into the store, the run's state into the live state."""
        activity = self._board.activity("steps")
        while True:
            async with self._attempt(self._state.steps_source, activity, "coordinator"):
                await self._read_steps(StepWatch(self._stub, self._state.run_id, activity), activity)

    async def follow_members(self) -> None:
        """The membership into the live state."""
        activity = self._board.activity("members")
        async for members in MemberWatch(self._stub, self._state.run_id, "", activity):
            self._state.members_source.reached()
            self._state.set_members(members)

    async def poll_members(self) -> None:
        """Status of every process and load of every engine, once a second."""
        watches = {"members": self._state.members_source, "steps": self._state.steps_source}
        while True:
            # A watch never fails; what keeps it from its stream stands in its activity only.
            for name, source in watches.items():
                cause = self._board.activity(name).waiting_for
                # The coordinator ends the watches of a run that has ended.
                if cause and not (self._state.ended and cause.endswith(STREAM_ENDED)):
                    source.failed(cause)
                elif cause:
                    source.reached()
            live = [item for item in self._state.members.values() if item.gone_since is None]
            await asyncio.gather(*map(self._poll, live))
            await self._close_unused()
            await self._sample(live)
            await asyncio.sleep(self._every)

    async def poll_ledger(self, account: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        """The ledger account into the live state, and into the store when it changed."""
        activity = self._board.activity("ledger")
        stored = ""
        while True:
            async with self._attempt(self._state.ledger_source, activity, "Redis"):
                async with asyncio.timeout(5):
                    self._state.account = await account()
                self._state.ledger_source.reached()
                _does(activity, "reading the account")
                body = json.dumps(self._state.account)
                if body != stored:
                    await self._save(self._store.put_account(time.time(), body))
                    stored = body
            await asyncio.sleep(self._every)

    async def close(self) -> None:
        """Close the channels."""
        for channel in self._channels.values():
            await channel.close()

    async def _read_steps(self, watch: StepWatch, activity: Activity) -> None:
        """What comes while a batch is stored makes the next one."""
        incoming: asyncio.Queue[pb.WatchStepsResponse] = asyncio.Queue(2 * _BATCH)

        async def pump() -> None:
            async for response in watch:
                await incoming.put(response)

        async def store() -> None:
            while True:
                batch = [await incoming.get()]
                while len(batch) < _BATCH and not incoming.empty():
                    batch.append(incoming.get_nowait())
                self._state.steps_source.reached()
                _does(activity, "following step records")
                await self._take(batch)

        tasks = {asyncio.create_task(pump()), asyncio.create_task(store())}
        try:
            # Neither ends but by an error.
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _take(self, batch: list[pb.WatchStepsResponse]) -> None:
        rows = []
        for response in batch:
            self._note(response.header)
            if response.HasField("run"):
                self._state.run = response.run
            if response.HasField("record"):
                rows.append(_row(response.record))
        if rows:
            await self._save(self._store.put_steps(rows))

    def _note(self, header: pb.ResponseHeader) -> None:
        self._state.newest_version = max(self._state.newest_version, header.weight_version)

    async def refresh_run(self) -> None:
        """The run itself, at the start and then every few seconds: WatchSteps tells of changes only."""
        activity = self._board.activity("run")
        while True:
            async with self._attempt(Source("run"), activity, "coordinator"):
                response = await self._stub.GetRun(pb.GetRunRequest(run_id=self._state.run_id), timeout=5)
                self._state.run = response.run
                self._note(response.header)
                _does(activity, "")
            await asyncio.sleep(3 * self._every)

    async def _poll(self, item: FollowedMember) -> None:
        channel = self._channel(item.member.address)
        try:
            if item.member.service == "engine":
                # First: it brings the gauges of the status up to date.
                item.load = await engine_grpc.EngineServiceStub(channel).GetLoad(
                    engine_pb.GetLoadRequest(), timeout=STATUS_SECONDS
                )
                item.last_version = item.load.weight_version
            item.status = await status_grpc.StatusServiceStub(channel).GetStatus(
                status_pb.GetStatusRequest(), timeout=STATUS_SECONDS
            )
            item.look_at_busy(time.monotonic())
            item.source.reached()
        except grpc.aio.AioRpcError as error:
            item.load = None
            item.source.failed(errors.last_cause(error))

    async def _sample(self, live: list[FollowedMember]) -> None:
        engines = [item for item in live if item.member.service == "engine" and item.load is not None]
        ranks = [item.load.ranks for item in engines if item.load is not None]
        if not ranks:
            return
        running = [sum(rank.num_running for rank in each) for each in ranks]
        waiting = [sum(rank.num_waiting for rank in each) for each in ranks]
        busy = sum(
            float(some + more > 0) if item.busy_share is None else item.busy_share
            for item, some, more in zip(engines, running, waiting, strict=True)
        )
        rate = sum(rank.tokens_per_second for each in ranks for rank in each)
        await self._save(
            self._store.put_sample(FleetSample(time.time(), len(ranks), busy, sum(running), sum(waiting), rate))
        )

    async def _save(self, write: Awaitable[None]) -> None:
        """A write that may fail without ending the follower: the disk may be full for a while."""
        try:
            await write
            self._state.store_source.reached()
        except (sqlite3.Error, TimeoutError) as error:
            self._state.store_source.failed(f"{error or 'no answer within 30 s'}")

    def _channel(self, address: str) -> grpc.aio.Channel:
        if address not in self._channels:
            self._channels[address] = open_channel(address)
        return self._channels[address]

    async def _close_unused(self) -> None:
        used = {item.member.address for item in self._state.members.values() if item.gone_since is None}
        for address in set(self._channels) - used:
            await self._channels.pop(address).close()

    @asynccontextmanager
    async def _attempt(self, source: Source, activity: Activity, whom: str) -> AsyncIterator[None]:
        """Around one attempt: a failure that another attempt may mend becomes the source's state."""
        failure = ""
        try:
            yield
        except grpc.aio.AioRpcError as error:
            # Our own limit on a stream is no failure of the other side.
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or not source.ok:
                failure = errors.last_cause(error)
        except (errors.PacelineError, redis.exceptions.RedisError, OSError, TimeoutError) as error:
            failure = str(error) or "no answer in time"
        if failure:
            source.failed(failure)
            with activity.waiting(f"{whom}: {failure}"):
                await asyncio.sleep(self._every / 2)


def _does(activity: Activity, doing: str) -> None:
    """Say what is done, without a new start of the same."""
    if activity.doing != doing:
        activity.set(doing)


def _row(record: pb.StepRecord) -> StepRow:
    return StepRow(
        kind=_KINDS.get(record.kind, "train"), name=record.name, step=record.step,
        time=record.time.ToNanoseconds() / 1e9, weight_version=record.weight_version, trace_id=record.trace_id,
        values=dict(record.values), group_ids=list(record.group_ids),
    )  # fmt: skip
