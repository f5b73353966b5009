"""The coordinator's state in Redis: one atomic change at a time for each run, repeated requests answered as at first.

A change reads under WATCH of the run's revision and writes in one MULTI, so that it is whole or not at all, also when
two coordinators overlap during a replacement. Bells wake the watchers of this process after each change.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

import redis.asyncio
from google.protobuf.message import Message
from redis.exceptions import ResponseError, WatchError

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.bell import Bell
from paceline.rpc import errors
from paceline.rpc.checks import checked_name
from services.coordinator import keys
from services.coordinator.keys import RunKeys
from services.coordinator.recent import RecentChanges

log = logging.getLogger(__name__)

ANSWER_SECONDS = 86_400
REDIS_SECONDS = 4.0
ATTEMPTS = 20

T = TypeVar("T")
M = TypeVar("M", bound=Message)


class Mutation(Protocol):
    """A request with an idempotency key."""

    request_id: str
    run_id: str

    def SerializeToString(self, *, deterministic: bool = ...) -> bytes: ...


class View:
    """Reads of one run's keys."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self._client = client
        self.run_id = run_id
        self.keys = RunKeys(run_id)

    async def read(self, *command: Any) -> Any:
        """One Redis command."""
        return await self._client.execute_command(*command)

    async def number(self, key: str) -> int:
        """An integer key, 0 when it is unset."""
        return int(await self.read("GET", key) or 0)

    async def message(self, kind: type[M], key: str, field: Any = None) -> M | None:
        """A stored message: a plain key, or one field of a hash."""
        data = await (self.read("GET", key) if field is None else self.read("HGET", key, field))
        return kind.FromString(data) if data is not None else None

    async def messages(self, kind: type[M], key: str, fields: Sequence[Any]) -> list[M]:
        """The fields of a hash that exist, in the order asked for."""
        if not fields:
            return []
        found = await self.read("HMGET", key, *fields)
        return [kind.FromString(data) for data in found if data is not None]

    async def all_messages(self, kind: type[M], key: str) -> list[M]:
        """Every message of a hash."""
        return [kind.FromString(data) for data in await self.read("HVALS", key)]

    async def header(self) -> pb.ResponseHeader:
        """How fresh this view is."""
        newest, revision = await self.read("MGET", self.keys.newest, self.keys.revision)
        return pb.ResponseHeader(run_id=self.run_id, weight_version=int(newest or 0), revision=int(revision or 0))


class Transaction(View):
    """A change of one run: reads at once, writes together at the end."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        super().__init__(client, run_id)
        self.writes: list[tuple[Any, ...]] = []
        self.topics: set[str] = set()
        self.newest: int | None = None

    def write(self, *command: Any) -> None:
        """Add a Redis command to the change."""
        self.writes.append(command)

    def store(self, message: Message, key: str, field: Any = None) -> None:
        """Set a message: a plain key, or one field of a hash."""
        data = message.SerializeToString()
        self.write(*(("SET", key, data) if field is None else ("HSET", key, field, data)))

    def touch(self, topic: str) -> None:
        """Something that watchers of `topic` should see has changed."""
        self.topics.add(topic)

    async def header(self) -> pb.ResponseHeader:
        """The header that holds once this change is written."""
        header = await super().header()
        header.revision += 1 if self.topics else 0
        if self.newest is not None:
            header.weight_version = self.newest
        return header


class Store:
    """All runs. `change` and `answer` write; `view` reads; `bell` tells when to read again."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._recent: defaultdict[str, RecentChanges] = defaultdict(RecentChanges)
        self._bells: dict[tuple[str, str], Bell] = {}
        self._closed = False
        self.active: set[str] = set()
        """Runs that this process has changed: where a lease may run out."""

    def bell(self, run_id: str, topic: str) -> Bell:
        """Rung after each change of a topic: run, versions, members, steps or barriers."""
        return self._bells.setdefault((run_id, topic), Bell())

    def close(self) -> None:
        """Let every watch end now, with UNAVAILABLE."""
        self._closed = True
        for bell in self._bells.values():
            bell.ring()

    def check_open(self) -> None:
        """Unavailable once the coordinator stops."""
        if self._closed:
            raise errors.Unavailable("the coordinator is stopping; connect again", 0.2)

    def view(self, run_id: str) -> View:
        """Reads of a run. InvalidArgument when the run id is no name."""
        return View(self._client, checked_name(run_id, "run_id"))

    async def read(self, run_id: str, body: Callable[[View], Awaitable[T]]) -> T:
        """What `body` reads, with a limit on the time that Redis may take."""
        return await _in_time(body(self.view(run_id)))

    async def change(self, run_id: str, body: Callable[[Transaction], Awaitable[T]]) -> T:
        """Run `body` and write what it asked for, whole or not at all. It runs again when the run changed meanwhile."""
        self.active.add(checked_name(run_id, "run_id"))
        async with self._locks[run_id]:
            return await _in_time(self._change(run_id, body))

    async def answer(self, request: Mutation, kind: type[M], body: Callable[[Transaction], Awaitable[M]]) -> M:
        """The response of `body`, written together with its change; a repeat of the request gets the same response."""
        if not request.request_id or len(request.request_id) > 200:
            raise errors.InvalidArgument(
                f"request_id {request.request_id[:40]!r} must be set, up to 200 characters, and new for each request"
            )
        mark = hashlib.sha256(
            kind.DESCRIPTOR.full_name.encode() + request.SerializeToString(deterministic=True)
        ).digest()

        async def once(change: Transaction) -> M:
            key = change.keys.answer(request.request_id)
            first = await change.read("GET", key)
            if first is not None:
                if first[: len(mark)] != mark:
                    raise errors.InvalidArgument(
                        f"request_id {request.request_id!r} was used for another request; use a new one for each"
                    )
                return kind.FromString(first[len(mark) :])
            response = await body(change)
            response.header.CopyFrom(await change.header())  # type: ignore[attr-defined]
            change.write("SET", key, mark + response.SerializeToString(), "EX", ANSWER_SECONDS)
            return response

        return await self.change(request.run_id, once)

    async def runs(self) -> list[str]:
        """Ids of the runs there are."""
        found: set[bytes] = await _in_time(self._command("SMEMBERS", keys.RUNS))
        return sorted(item.decode() for item in found)

    async def know_run(self, run_id: str) -> None:
        """List a run among the runs there are."""
        checked_name(run_id, "run_id")
        await _in_time(self._command("SADD", keys.RUNS, run_id))

    async def _command(self, *command: Any) -> Any:
        return await self._client.execute_command(*command)

    async def _change(self, run_id: str, body: Callable[[Transaction], Awaitable[T]]) -> T:
        for _ in range(ATTEMPTS):
            async with self._client.pipeline(transaction=True) as pipe:
                try:
                    await pipe.watch(RunKeys(run_id).revision)
                    change = Transaction(pipe, run_id)
                    revision = await change.number(change.keys.revision)
                    if revision < self._recent[run_id].revision:
                        await self._write_again(pipe, change, revision)
                        continue
                    result = await body(change)
                    if change.topics:
                        change.write("INCR", change.keys.revision)
                    await _execute(pipe, change.writes)
                except WatchError:
                    continue
            if change.topics:
                self._recent[run_id].add(revision + 1, change.writes)
            for topic in change.topics:
                self.bell(run_id, topic).ring()
            return result
        raise errors.Unavailable(f"run {run_id!r} changed {ATTEMPTS} times during one change; try again", 0.5)

    async def _write_again(self, pipe: Any, change: Transaction, revision: int) -> None:
        """Bring a store that lost its latest changes back to where it was; one that lost more is taken as it is."""
        recent = self._recent[change.run_id]
        writes = recent.after(revision)
        if writes is None:
            log.error("the store of run %s went back from revision %d to %d", change.run_id, recent.revision, revision)
            recent.forget(revision)
            return
        await _execute(pipe, writes)
        log.warning(
            "the store of run %s had lost revisions %d to %d; they were written again",
            change.run_id, revision + 1, recent.revision,
        )  # fmt: skip


async def _execute(pipe: Any, writes: list[tuple[Any, ...]]) -> None:
    if not writes:
        return
    pipe.multi()
    for command in writes:
        pipe.execute_command(*command)
    await pipe.execute()


async def _in_time(work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(REDIS_SECONDS):
            return await work
    except TimeoutError as error:
        raise errors.Unavailable(f"Redis did not answer within {REDIS_SECONDS:g} s; is it running?", 0.5) from error
    except ResponseError as error:
        known = errors.translate(error)
        if known is None:
            raise
        raise known from error
