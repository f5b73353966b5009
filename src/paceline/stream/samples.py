"""The sample stream: finished groups on their way from rollout to trainer, each delivered once, never evicted."""

from __future__ import annotations

from dataclasses import dataclass

import redis.asyncio
from google.protobuf.message import DecodeError

from paceline.api.common.v1 import sample_pb2
from paceline.ledger import keys
from paceline.ledger.scripts import ScriptRunner
from paceline.rpc import errors
from paceline.samples import InvalidSample, SampleGroup

RETRY_DELAY = 0.5
"""Seconds that a producer is told to wait when the buffer is full."""
_READ_ENTRIES = 64
TOO_STALE = ("reissue", "drop")


@dataclass(frozen=True)
class Claim:
    """The groups of one training step, in the order of their first claim.

    `trainer_version` is that of the first claim; `refused` counts the groups refused as stale since the claim before.
    """

    step: int
    groups: list[SampleGroup]
    trainer_version: int
    refused: int
    replayed: bool


@dataclass(frozen=True)
class NotReady:
    """Too few groups are buffered for a step; none was taken."""

    have: int
    want: int


class SampleStream:
    """The stream of one run. `capacity`: the most groups that wait in it; a producer that meets it must wait.

    Every method is atomic and idempotent. All raise Unavailable when Redis cannot be reached, and FailedPrecondition
    when the ledger is gone or was replaced; those of the trainer also when a newer trainer holds the run (see `hold`).
    """

    def __init__(self, client: redis.asyncio.Redis, run_id: str, capacity: int) -> None:
        if capacity < 1:
            raise errors.InvalidArgument(f"stream capacity is {capacity}; it must be at least 1")
        self._scripts = ScriptRunner(client, run_id)
        self._client = client
        self.run_id = run_id
        self.capacity = capacity

    async def attach(self) -> str:
        """Accept the ledger that is there now, after it was restored, and return its id."""
        return await self._scripts.attach()

    def hold(self, fence: int, incarnation: str) -> None:
        """Act as the trainer that holds `fence`, the number that the coordinator gave out last (they only go up).

        claim, mark_trained, commit and rewind carry it. The first of them with a new fence shuts every earlier trainer
        out: one that was frozen and comes back gets FailedPrecondition, which names both, and changes nothing.
        """
        self._scripts.hold(fence, incarnation)

    async def put(self, group: SampleGroup) -> str:
        """Hand a finished group over: "accepted", "duplicate", or "stale_attempt" when it was issued again since.

        InvalidArgument for a group that does not hold together; ResourceExhausted with a retry delay when the buffer
        is full (nothing is evicted: keep the group, renew its lease, and try again after a change).
        """
        if group.run_id != self.run_id:
            raise errors.InvalidArgument(f"group {group.group_id} is of run {group.run_id!r}, not {self.run_id!r}")
        try:
            version = group.oldest_version
            payload = group.to_wire().SerializeToString()
        except InvalidSample as error:
            raise errors.InvalidArgument(str(error)) from error
        return await self.put_payload(group.group_id, group.attempt, version, group.traceparent, payload)

    async def put_payload(
        self, group_id: str, attempt: int, oldest_version: int, traceparent: str, payload: bytes
    ) -> str:
        """`put` for a group that is encoded already; `payload` is a checked SampleGroup message."""
        outcome, buffered = await self._scripts.run(
            "put", group_id, attempt, self.capacity, oldest_version, traceparent, payload
        )
        if outcome == b"full":
            raise errors.ResourceExhausted(
                f"sample stream of run {self.run_id} is full: {buffered} of {self.capacity} groups wait for the "
                f"trainer; put group {group_id} again later",
                RETRY_DELAY,
            )
        return outcome.decode()

    async def claim(
        self,
        consumer: str,
        step: int,
        count: int,
        trainer_version: int,
        max_staleness: int | None,
        too_stale: str = "reissue",
        max_attempts: int | None = None,
        in_data_order: bool = False,
    ) -> Claim | NotReady:
        """Take `count` groups for `step`, all or none, in the order in which they were put.

        With `in_data_order` they are the next ones of the data, and none is taken before all that stand before it are
        put, dropped or dead: then a step's groups do not depend on how fast which of them was made.

        A step that was claimed before gets the same groups and the trainer version of then, whoever held them. Groups
        with trainer_version - oldest_version > max_staleness (None: no bound) are refused first: issued again, or
        dropped as "stale" by `too_stale`; one refused `max_attempts` times (None: no limit) is dropped. A refusal is
        not a failed attempt. FailedPrecondition when max_staleness is 0 and a group is newer than the trainer, when
        `count` exceeds the capacity, or when the step is at or before one that was claimed or committed.
        """
        if too_stale not in TOO_STALE:
            raise errors.InvalidArgument(f"too_stale is {too_stale!r}; it must be one of {', '.join(TOO_STALE)}")
        if step < 1 or count < 1:
            raise errors.InvalidArgument(f"step {step} and count {count} must be at least 1")
        if count > self.capacity:
            raise errors.FailedPrecondition(
                f"a step takes {count} groups, but the stream holds at most {self.capacity}: it could never fill; "
                "raise rollout.buffer_groups"
            )
        reply = await self._scripts.run(
            "claim", consumer, step, count, trainer_version, -1 if max_staleness is None else max_staleness, too_stale,
            -1 if max_attempts is None else max_attempts, int(in_data_order),
        )  # fmt: skip
        if reply[0] == 0:
            return NotReady(int(reply[1]), count)
        version, refused, replayed = (int(item) for item in reply[1:4])
        names = [item.decode() for item in reply[4:]]
        read = self._read_each if in_data_order else self._read
        groups = await read(names[::2], names[1::2])
        return Claim(step, groups, version, refused, bool(replayed))

    async def _read(self, group_ids: list[str], entry_ids: list[str]) -> list[SampleGroup]:
        """Read and decode neighbouring entries of the stream, some at a time to bound the size of a reply."""
        stream = keys.key(self.run_id, "samples")
        groups = []
        for first in range(0, len(entry_ids), _READ_ENTRIES):
            expected = entry_ids[first : first + _READ_ENTRIES]
            entries = await self._scripts.command(
                self._client.xrange(stream, expected[0], expected[-1], count=len(expected))
            )
            if [entry_id.decode() for entry_id, _ in entries] != expected:
                raise errors.DataLoss(
                    f"sample stream of run {self.run_id} does not hold groups {group_ids[first]} to "
                    f"{group_ids[first + len(expected) - 1]}; restart the trainer to restore the ledger"
                )
            groups += [self._decode(group_ids[first + at], fields) for at, (_, fields) in enumerate(entries)]
        return groups

    async def _read_each(self, group_ids: list[str], entry_ids: list[str]) -> list[SampleGroup]:
        """Read and decode entries that are not neighbours."""
        groups = []
        for group_id, entry_id in zip(group_ids, entry_ids, strict=True):
            groups += await self._read([group_id], [entry_id])
        return groups

    async def mark_trained(self, step: int) -> None:
        """The optimizer step on the groups of `step` is done. FailedPrecondition when the step was never claimed."""
        await self._scripts.run("mark_trained", step)

    async def commit(self, step: int) -> int:
        """A durable checkpoint contains every step up to `step`: settle them and free their payloads.

        Returns how many steps were settled by this call; 0 when it was done before. FailedPrecondition when a claimed
        step among them is not trained.
        """
        return int(await self._scripts.run("commit", step))

    async def rewind(self, step: int, reissue_committed: bool = False) -> list[int]:
        """Follow a trainer that was loaded from the checkpoint of `step` (0: from the start).

        Later trained steps are claimed again; returns the later steps with a recorded claim, which `claim` replays.
        FailedPrecondition when later steps are committed, because their payloads are gone; with `reissue_committed`
        (their checkpoint was lost) the prompts of all later steps are issued again instead.
        """
        return [int(item) for item in await self._scripts.run("rewind", step, int(reissue_committed))]

    def _decode(self, group_id: str, fields: dict[bytes, bytes]) -> SampleGroup:
        try:
            return SampleGroup.from_wire(sample_pb2.SampleGroup.FromString(fields[b"payload"]))
        except (InvalidSample, DecodeError) as error:
            raise errors.DataLoss(f"group {group_id} in the sample stream cannot be read: {error}") from error
