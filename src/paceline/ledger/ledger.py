"""The ledger of a run: who was issued which prompt, and what became of it, so that none is lost or trained twice."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import redis.asyncio

from paceline.ids import GroupId, new_id
from paceline.ledger import keys
from paceline.ledger.account import IN_FLIGHT, STATES, Account, Event, GroupRecord, Issue
from paceline.ledger.scripts import ScriptRunner
from paceline.rpc import errors

SNAPSHOT_FORMAT = 1
_DETAIL_LENGTH = 500
_BLOCK_SECONDS = 5.0
_LOOK_GROUPS = 1000


class Ledger:
    """The ledger of one run in Redis. Safe for any number of producers and processes; every method is atomic.

    All methods raise Unavailable when Redis cannot be reached, and FailedPrecondition when the ledger is gone (Redis
    lost its data) or was replaced since this object first saw it.
    """

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self._scripts = ScriptRunner(client, run_id)
        self._client = client
        self.run_id = run_id
        self._requests: dict[str, str] = {}
        self._issuing = asyncio.Lock()

    async def initialise(self, dataset_size: int, epochs: int) -> None:
        """Create the ledger, or accept the one that is there.

        FailedPrecondition when it was made for another dataset size, or more was issued than `epochs` allow.
        """
        if dataset_size < 1 or epochs < 1:
            raise errors.InvalidArgument(f"dataset_size {dataset_size} and epochs {epochs} must be at least 1")
        await self._scripts.run_unattached("initialise", dataset_size, epochs, new_id())
        await self._scripts.attach()

    async def attach(self) -> str:
        """Accept the ledger that is there now, after it was restored, and return its id."""
        return await self._scripts.attach()

    def hold(self, fence: int, incarnation: str) -> None:
        """Let `restore` be that of the trainer which holds `fence`; see SampleStream.hold."""
        self._scripts.hold(fence, incarnation)

    async def issue(self, owner: str, count: int, lease_seconds: float, ceiling: int | None) -> list[Issue]:
        """Lease up to `count` groups to `owner`: those to issue again by lowest id, then the next of the data.

        New groups never let issued - dropped - dead exceed `ceiling`; groups that are issued again do not count anew.
        Empty when nothing may be issued. When a call fails, the next one returns the groups the failed one leased.
        """
        _positive("lease_seconds", lease_seconds)
        limit = -1 if ceiling is None else max(0, ceiling)
        async with self._issuing:
            request = self._requests.setdefault(owner, new_id())
            reply = await self._scripts.run("issue", owner, count, lease_seconds, limit, request)
            del self._requests[owner]
        return [Issue(_text(reply[at]), int(reply[at + 1])) for at in range(0, len(reply), 2)]

    async def renew(self, owner: str, lease_seconds: float) -> int:
        """Let all leases of `owner` last `lease_seconds` from now; returns how many there are."""
        _positive("lease_seconds", lease_seconds)
        return int(await self._scripts.run("renew", owner, lease_seconds))

    async def release(self, owner: str) -> list[str]:
        """Give back everything that `owner` generates: a producer calls it at its start, for its earlier life."""
        if not owner:
            raise errors.InvalidArgument("release needs the name of an owner; for leases that ran out use expire")
        return [_text(item) for item in await self._scripts.run("reclaim", owner)]

    async def expire(self) -> list[str]:
        """Give back every group whose lease ran out; returns their ids."""
        return [_text(item) for item in await self._scripts.run("reclaim", "")]

    async def drop(self, group_id: str, attempt: int, reason: str) -> str:
        """End a group that the filter refused. "dropped", or "stale_attempt" when this attempt is no longer current."""
        if not reason or len(reason) > 64 or any(character.isspace() for character in reason):
            raise errors.InvalidArgument(f"drop reason {reason!r} must be one word of at most 64 characters")
        return _text(await self._scripts.run("drop", group_id, attempt, reason))

    async def fail(self, group_id: str, attempt: int, error: str, max_attempts: int) -> str:
        """An attempt failed: "reissued", or "dead" after `max_attempts` failures; "stale_attempt" changes nothing.

        `max_attempts` 0: the failure does not speak against the prompt (a service was away) and is not counted.
        """
        return _text(await self._scripts.run("fail", group_id, attempt, error[:_DETAIL_LENGTH], max_attempts))

    async def account(self, recount: bool = False) -> Account:
        """The account at one instant. `recount` also counts every record anew: O(issued), for an audit."""
        meta, counted = await self._scripts.run("account", int(recount))
        counts = {name: int(value) for name, value in _pairs(counted).items()}
        return Account.parse(_pairs(meta), counts if recount else None)

    async def group(self, group_id: str) -> GroupRecord:
        """The record of one group; NotFound when it was never issued (or settled before a restore)."""
        for part in ("live", "settled", "dead"):
            text = await self._hash("hget", part, group_id)
            if text is not None:
                return GroupRecord.parse(group_id, text.decode())
        raise errors.NotFound(f"group {group_id} of run {self.run_id} is not in the ledger: it was never issued")

    async def history(self, group_id: str) -> list[Event]:
        """The states that a group went through, oldest first; the oldest of a very long history are cut off."""
        return list((await self.group(group_id)).history)

    async def groups(self, state: str) -> list[GroupRecord]:
        """All groups in one state, by id. O(issued) for "committed" and "dropped"."""
        if state not in STATES:
            raise errors.InvalidArgument(f"there is no group state {state!r}; states are {', '.join(STATES)}")
        part = {"committed": "settled", "dropped": "settled", "dead": "dead"}.get(state, "live")
        values = await self._hash("hgetall", part)
        found = [GroupRecord.parse(name.decode(), text.decode()) for name, text in values.items()]
        return sorted((item for item in found if item.state == state), key=lambda item: GroupId.parse(item.group_id))

    async def committed_groups(self) -> dict[int, list[str]]:
        """Group ids of every committed step (of those since the last restore)."""
        values = await self._hash("hgetall", "steps")
        return {int(step): values[step].decode().split() for step in sorted(values, key=int)}

    async def live_attempts(self, group_ids: Sequence[str]) -> dict[str, int]:
        """The present attempt of each of these groups that is in flight, or trained by a step without a checkpoint."""
        found: dict[str, int] = {}
        for first in range(0, len(group_ids), _LOOK_GROUPS):
            part = group_ids[first : first + _LOOK_GROUPS]
            reply = await self._scripts.run("live_attempts", *part)
            found |= {group_id: int(attempt) for group_id, attempt in zip(part, reply, strict=True) if attempt}
        return found

    async def snapshot(self) -> dict[str, Any]:
        """The ledger's part of a checkpoint, as JSON values: cursor, account, groups in flight, dead groups."""
        raw_meta, live, dead = await self._scripts.run("snapshot")
        meta = _pairs(raw_meta)
        account = Account.parse(meta)
        groups = {}
        for name, text in {**_pairs(live), **_pairs(dead)}.items():
            item = GroupRecord.parse(name, text)
            groups[name] = [item.state, item.attempt, item.failures, item.step, item.detail]
        settled = {name: int(meta[name]) for name in meta if name == "n:committed" or name.startswith("dropped:")}
        return {
            "format": SNAPSHOT_FORMAT, "run_id": self.run_id, "lineage": meta["lineage"],
            "sequence": int(meta["sequence"]), "dataset_size": account.dataset_size, "epochs": account.epochs,
            "cursor": account.cursor, "issued": account.issued, "refused_stale": account.refused_stale,
            "committed_step": account.committed_step, "settled": settled, "groups": groups,
            "account": {state: getattr(account, state) for state in (*IN_FLIGHT, "trained", "dead")},
        }  # fmt: skip

    async def restore(self, snapshot: Mapping[str, Any]) -> bool:
        """Put the ledger back from a checkpoint when Redis lost it; True when that was done.

        Cursor and account come back; what was in flight is waiting again with a higher attempt; steps that were
        trained at the snapshot are committed, since the checkpoint contains them. A ledger that is there and not
        older than the snapshot is left alone. A trainer calls this at every start from a checkpoint, before `rewind`.
        """
        if snapshot.get("format") != SNAPSHOT_FORMAT or snapshot.get("run_id") != self.run_id:
            raise errors.InvalidArgument(
                f"snapshot of run {snapshot.get('run_id')!r}, format {snapshot.get('format')!r}, cannot restore run "
                f"{self.run_id!r}, format {SNAPSHOT_FORMAT}; take the checkpoint of this run"
            )
        done = await self._scripts.run_unattached("restore", json.dumps(snapshot), new_id())
        await self._scripts.attach()
        return bool(done)

    async def wait_change(self, token: str, timeout: float, openings: bool = False) -> str:
        """Wait until anything changed after `token`, for at most `timeout` seconds; returns the token of now.

        The empty token returns at once. Take a token, look, and wait with that token: no change is missed. With
        `openings` (and tokens of such calls) only changes count after which more may be issued: not each issue and put.
        """
        bell = keys.key(self.run_id, "openings" if openings else "doorbell")
        if not token:
            last = await self._scripts.command(self._client.xrevrange(bell, count=1))
            return _text(last[0][0]) if last else "0-0"
        deadline = time.monotonic() + timeout
        while (left := deadline - time.monotonic()) > 0:
            block = max(1, math.ceil(min(left, _BLOCK_SECONDS) * 1000))
            reply = await self._scripts.command(self._client.xread({bell: token}, block=block, count=1))
            if reply:
                entries = next(iter(reply.values()))[0] if isinstance(reply, dict) else reply[0][1]
                return _text(entries[-1][0])
            await asyncio.sleep(0)
        return token

    async def _hash(self, command: str, part: str, *values: str) -> Any:
        return await self._scripts.command(getattr(self._client, command)(keys.key(self.run_id, part), *values))


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _pairs(flat: list[bytes]) -> dict[str, str]:
    return {_text(flat[at]): _text(flat[at + 1]) for at in range(0, len(flat), 2)}


def _positive(name: str, value: float) -> None:
    if not value > 0:
        raise errors.InvalidArgument(f"{name} is {value}; it must be above 0")
