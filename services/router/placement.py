"""Placement: waits until an engine may take a request, chooses one by the policy, and says what is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard
from paceline.weights.gate import admits
from services.router.policies.base import Placing, Policy
from services.router.table import Engine, EngineTable, Rank
from services.router.versions import PublishedVersions

FULL_RETRY_SECONDS = 0.5


@dataclass
class Wanted:
    """What a request asks of an engine."""

    placing: Placing
    gate: generation_pb.VersionGate
    preferred_version: int = 0
    """Take an engine at this version where there is one; 0 means no preference."""
    avoid: dict[Engine, float] = field(default_factory=dict)
    """Engines that refused this request, and the loop time until which they are left alone."""
    abandoned: Callable[[], bool] = lambda: False
    """Whether the request was given up; looked at after every change of the table."""

    @property
    def gate_text(self) -> str:
        """The gate in words: "weight version >= 5"."""
        kind = self.gate.WhichOneof("gate")
        if kind == "min_version":
            return f"weight version >= {self.gate.min_version}"
        if kind == "exact_version":
            return f"weight version {self.gate.exact_version}"
        return "any weight version"


class Placement:
    """Finds a rank for each request. `board` shows who waits and for what."""

    def __init__(
        self, table: EngineTable, versions: PublishedVersions, policy: Policy, board: StatusBoard, max_waiting: int
    ) -> None:
        self._table = table
        self._versions = versions
        self._policy = policy
        self._board = board
        self._max_waiting = max_waiting
        self._waiting: dict[str, str] = {}
        """Cause by request id, oldest first."""
        self._placed = 0
        self._show()

    @property
    def num_waiting(self) -> int:
        """Requests that no engine could take yet."""
        return len(self._waiting)

    def candidates(self, wanted: Wanted) -> list[Rank]:
        """Ranks that may take the request now."""
        now = asyncio.get_running_loop().time()
        found = [
            rank
            for rank in self._table.ranks
            if not self._table.excluded_reason(rank.engine)
            and admits(wanted.gate, rank.engine.weight_version)
            and wanted.avoid.get(rank.engine, 0.0) <= now
        ]
        if wanted.preferred_version:
            return [rank for rank in found if rank.engine.weight_version == wanted.preferred_version] or found
        return found

    async def place(self, wanted: Wanted, deadline: float) -> Rank | None:
        """A rank, with the request's samples counted on it; give it back with `release`. `deadline` is loop time.
        None when the request was abandoned meanwhile.

        DeadlineExceeded says which version was wanted and which engines serve which; FailedPrecondition when the exact
        version is past; ResourceExhausted when too many wait already.
        """
        request_id = wanted.placing.request_id
        try:
            while not wanted.abandoned():
                change = self._table.change()
                found = self.candidates(wanted)
                if found:
                    rank = self._policy.choose(wanted.placing, found)
                    self._placed += 1
                    rank.take(wanted.placing.num_samples, self._placed)
                    return rank
                self._check_possible(wanted)
                self._enter(request_id, f"{wanted.gate_text}; {self.serving_text(wanted)}")
                await self._wait(change, wanted, deadline)
            return None
        finally:
            if self._waiting.pop(request_id, None) is not None:
                self._show()

    def release(self, rank: Rank, num_samples: int) -> None:
        """The request's samples no longer count."""
        rank.num_in_flight -= num_samples

    def serving_text(self, wanted: Wanted) -> str:
        """Why each engine cannot take the request: "engine-0 serves 4, engine-1 is STARTING"."""
        now = asyncio.get_running_loop().time()
        parts = []
        for engine in self._table.engines:
            reason = self._table.excluded_reason(engine)
            if not reason and wanted.avoid.get(engine, 0.0) > now:
                reason = "refused for now"
            parts.append(f"{engine.engine_id} {reason or f'serves {engine.weight_version}'}")
        return ", ".join(parts) or "no engine has joined the run"

    def _enter(self, request_id: str, cause: str) -> None:
        if request_id not in self._waiting and len(self._waiting) >= self._max_waiting:
            raise errors.ResourceExhausted(
                f"router queue is full: {len(self._waiting)} requests wait (router.max_waiting = {self._max_waiting}), "
                f"the oldest for {next(iter(self._waiting.values()))}",
                FULL_RETRY_SECONDS,
            )
        if self._waiting.get(request_id) != cause:
            self._waiting[request_id] = cause
            self._show()

    def _check_possible(self, wanted: Wanted) -> None:
        if wanted.gate.WhichOneof("gate") != "exact_version":
            return
        exact = wanted.gate.exact_version
        engines = self._table.engines
        past = bool(engines) and not any(1 <= engine.weight_version <= exact for engine in engines)
        if exact < self._versions.newest and past:
            raise errors.FailedPrecondition(
                f"request {wanted.placing.request_id}: weight version {exact} can no longer be served: the newest is "
                f"{self._versions.newest}, and {self.serving_text(wanted)}; ask for a later version"
            )

    async def _wait(self, change: asyncio.Event, wanted: Wanted, deadline: float) -> None:
        now = asyncio.get_running_loop().time()
        until = min([deadline, *(time for time in wanted.avoid.values() if time > now)])
        try:
            async with asyncio.timeout_at(until):
                await change.wait()
        except TimeoutError:
            if until >= deadline:
                raise errors.DeadlineExceeded(
                    f"request {wanted.placing.request_id}: no engine could take it before its deadline: wants "
                    f"{wanted.gate_text}; {self.serving_text(wanted)}"
                ) from None

    def _show(self) -> None:
        """One activity for all that wait: how many, and the cause of the oldest."""
        activity = self._board.activity("queue")
        cause = next(iter(self._waiting.values()), "")
        if activity.waiting_for != cause:
            activity.set("")
            activity.waiting_for = cause
        count = len(self._waiting)
        activity.doing = f"{count} requests wait" if count else "no request waits"
        self._board.gauges["num_waiting"] = count
