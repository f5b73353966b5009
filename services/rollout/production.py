"""The production of groups: issue what may be issued, make each group, and enter into the ledger what became of it.

The ledger alone remembers; this process can be killed anywhere, and the next one goes on from there.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.bell import Bell, heard
from paceline.blobs import BlobKeeper
from paceline.config import RunFile
from paceline.ledger import Account, Issue, Ledger
from paceline.rpc import errors
from paceline.rpc.patience import PAUSE_SECONDS, until_available
from paceline.rpc.status import StatusBoard
from paceline.samples import SampleGroup
from paceline.stream import SampleStream
from paceline.telemetry import names, tracing
from services.rollout.admission import Bounds, Decision, Standing, decide
from services.rollout.attempt import Attempts, Dropped, Failed, Kept, Outcome
from services.rollout.board import GroupBoard
from services.rollout.given import NoVersions
from services.rollout.hold import Hold
from services.rollout.versions import NewestVersion

log = logging.getLogger(__name__)

T = TypeVar("T")

_LISTEN_SECONDS = 10.0
_FULL_SECONDS = 2.0
"""A full stream is tried again after this long even when no change was heard of."""


def standing(account: Account) -> Standing:
    """What admission needs of an account."""
    return Standing(
        counted=account.issued - sum(account.dropped.values()) - account.dead, waiting=account.waiting,
        generating=account.generating, buffered=account.buffered, claimed=account.claimed,
        exhausted=account.cursor >= account.total,
    )  # fmt: skip


class Production:
    """Produces groups for as long as the run needs them."""

    def __init__(
        self, config: RunFile, owner: str, ledger: Ledger, stream: SampleStream, attempts: Attempts, board: GroupBoard,
        status: StatusBoard, versions: NewestVersion | NoVersions, bell: Bell, hold: Hold,
        before_issue: Callable[[WeightVersion], Awaitable[None]], starved: Callable[[str], Awaitable[None]],
        blobs: BlobKeeper | None = None,
    ) -> None:  # fmt: skip
        self._blobs = blobs
        self._lease = config.rollout.lease_seconds
        self._bounds = Bounds.of(config)
        self._owner = owner
        self._ledger = ledger
        self._stream = stream
        self._attempts = attempts
        self._board = board
        self._status = status
        self._activity = status.activity("production")
        self._versions = versions
        self._bell = bell
        self._hold = hold
        self._before_issue = before_issue
        self._starved = starved
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._workers: asyncio.TaskGroup | None = None
        self._turn = asyncio.Lock()
        self._said_starved = False

    @property
    def num_in_flight(self) -> int:
        """Groups that are being made here."""
        return len(self._tasks)

    async def run(self) -> None:
        """Produce until cancelled. What an earlier process of this name left is given back first."""
        given_back = await self._patient(lambda: self._ledger.release(self._owner))
        if given_back:
            log.info("%d groups of an earlier life are issued again", len(given_back))
        await self._sweep()
        self._status.state = "READY"
        async with asyncio.TaskGroup() as self._workers:
            self._workers.create_task(self._listen(), name="listen")
            self._workers.create_task(self._keep_leases(), name="leases")
            await self._issue_for_ever()

    async def give_back(self) -> None:
        """At an orderly end: others may have our groups now, not when the leases run out."""
        try:
            async with asyncio.timeout(2.0):
                await self._ledger.release(self._owner)
        except (errors.PacelineError, TimeoutError) as error:
            log.info("groups were not given back, their leases run out instead: %s", error)

    async def _issue_for_ever(self) -> None:
        while True:
            version = await self._versions.first(self._activity)
            await self._before_issue(version)
            ticket = self._bell.ticket()
            if version is not self._versions.current:
                continue
            cause = self._hold.cause
            if not cause:
                account = await self._patient(self._ledger.account)
                decision = decide(self._bounds, version.step, self.num_in_flight, standing(account))
                self._show(account, decision)
                if decision.starved and not self._said_starved:
                    self._said_starved = True
                    await self._starved(decision.cause)
                if decision.count and await self._issue(decision, version):
                    continue
                cause = decision.cause or "the ledger"
            with self._activity.waiting(cause):
                await ticket.wait()

    async def _issue(self, decision: Decision, version: WeightVersion) -> int:
        issues = await self._patient(
            lambda: self._ledger.issue(self._owner, decision.count, self._lease, decision.ceiling)
        )
        assert self._workers is not None
        for issue in issues:
            before = self._tasks.get(issue.group_id)
            work = self._work(issue, version.weight_version, before)
            task = self._workers.create_task(work, name=issue.group_id)
            self._tasks[issue.group_id] = task
            task.add_done_callback(lambda task, group_id=issue.group_id: self._done(group_id, task))
        return len(issues)

    def _done(self, group_id: str, task: asyncio.Task[None]) -> None:
        if self._tasks.get(group_id) is task:
            del self._tasks[group_id]
        self._bell.ring()

    async def _work(self, issue: Issue, weight_version: int, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            # Our lease ran out and the group came back to us: the older attempt can only be refused.
            before.cancel()
            await asyncio.wait([before])
        attributes = {names.ATTRIBUTE_GROUP_ID: issue.group_id, names.ATTRIBUTE_ATTEMPT: issue.attempt}
        with self._board.group(issue.group_id), tracing.span(names.SPAN_ROLLOUT_GROUP, attributes):
            outcome = await self._attempts.make(issue, weight_version)
            await self._settle(issue, outcome)

    async def _settle(self, issue: Issue, outcome: Outcome) -> None:
        """Enter the outcome. A repeat is harmless, and an attempt that is no longer current changes nothing."""
        group_id, attempt = issue.group_id, issue.attempt
        self._board.stage(group_id, "settling")
        if isinstance(outcome, Kept):
            said = await self._put(outcome.group)
        elif isinstance(outcome, Dropped):
            reason = outcome.reason
            said = await self._patient(lambda: self._ledger.drop(group_id, attempt, reason), group_id)
        else:
            log.warning("attempt %d at group %s failed: %s", attempt, group_id, outcome.error)
            said = await self._fail(issue, outcome)
        if said == "stale_attempt":
            log.info("attempt %d at group %s came too late", attempt, group_id)
        if self._blobs is not None and (said == "stale_attempt" or not isinstance(outcome, Kept)):
            await self._blobs.remove(group_id, attempt)

    async def _sweep(self) -> None:
        """Remove blobs of attempts that are over and whose process cannot do it."""
        if self._blobs is not None and (count := await self._patient(self._blobs.sweep)):
            log.info("the blobs of %d attempts that are over were removed", count)

    async def _fail(self, issue: Issue, outcome: Failed) -> str:
        if outcome.limit == 0:
            with self._board.waiting(issue.group_id, outcome.error):
                await asyncio.sleep(PAUSE_SECONDS)
        return await self._patient(
            lambda: self._ledger.fail(issue.group_id, issue.attempt, outcome.error, outcome.limit), issue.group_id
        )

    async def _put(self, group: SampleGroup) -> str:
        """Put, waiting for room. One group tries at a time, so that a full stream is not sent every group again."""
        with tracing.span(names.SPAN_ROLLOUT_PUT, {names.ATTRIBUTE_GROUP_ID: group.group_id}):
            with self._board.waiting(group.group_id, "room in the stream"):
                async with self._turn:
                    while True:
                        ticket = self._bell.ticket()
                        try:
                            return await self._stream.put(group)
                        except errors.ResourceExhausted:
                            await heard(ticket, _FULL_SECONDS)
                        except errors.Unavailable as error:
                            with self._board.waiting(group.group_id, f"Redis: {error.message}"):
                                await asyncio.sleep(PAUSE_SECONDS)

    async def _patient(self, call: Callable[[], Awaitable[T]], group_id: str | None = None) -> T:
        if group_id is None:
            return await until_available(call, "Redis", self._activity.waiting)
        return await until_available(call, "Redis", lambda cause: self._board.waiting(group_id, cause))

    async def _listen(self) -> None:
        """Ring when groups were claimed, trained, refused, or came back; not for each of the many that are put."""
        activity = self._status.activity("ledger")
        token = ""
        while True:
            token = await until_available(
                lambda token=token: self._ledger.wait_change(token, _LISTEN_SECONDS, openings=True),
                "Redis",
                activity.waiting,
            )
            self._bell.ring()

    async def _keep_leases(self) -> None:
        activity = self._status.activity("leases")
        while True:
            renewed = await until_available(
                lambda: self._ledger.renew(self._owner, self._lease), "Redis", activity.waiting
            )
            expired = await until_available(self._ledger.expire, "Redis", activity.waiting)
            if expired:
                log.info("leases ran out, issued again: %s", ", ".join(expired[:10]))
                await self._sweep()
            activity.set(f"{renewed} leases renewed")
            self._status.facts["oldest_group"] = self._board.oldest()
            await asyncio.sleep(self._lease / 3)

    def _show(self, account: Account, decision: Decision) -> None:
        self._status.gauges.update({
            "in_flight": self.num_in_flight, "issued": account.issued, "waiting": account.waiting,
            "generating": account.generating, "buffered": account.buffered, "trained": account.trained,
            "dropped": sum(account.dropped.values()), "dead": account.dead, "ceiling": decision.ceiling,
            "finished": float(decision.finished and account.in_flight == 0),
        })  # fmt: skip
        for reason, count in account.dropped.items():
            self._status.gauges[f"dropped_{reason}"] = count
