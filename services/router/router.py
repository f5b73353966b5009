"""The router put together: table, versions, placement, health and flights around two feeds from the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence

from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.config import make_plugin
from paceline.config.services import RouterConfig
from paceline.rpc.status import StatusBoard
from services.router.flights import Flights
from services.router.health import HealthProber
from services.router.placement import Placement
from services.router.policies.base import Policy
from services.router.server import RouterServer
from services.router.table import EngineTable
from services.router.versions import HasVersion, PublishedVersions


class Router:
    """All parts of one router. `lookup` asks the coordinator whether one weight version is published."""

    def __init__(
        self, config: RouterConfig, board: StatusBoard, run_id: str, lookup: Callable[[int], Awaitable[bool]]
    ) -> None:
        policy: Policy = make_plugin("policy", config.policy, "router.policy")
        self._board = board
        self.versions = PublishedVersions(lookup)
        self.table = EngineTable(self.versions)
        self.placement = Placement(self.table, self.versions, policy, board, config.max_waiting)
        self.flights = Flights(self.table, self.placement, self.versions, board, config.max_retries)
        self.prober = HealthProber(
            self.table, self.versions, config.probe_every_seconds, config.probe_timeout_seconds
        )  # fmt: skip
        self.server = RouterServer(self.table, self.placement, self.flights, run_id)

    async def run(
        self, members: AsyncIterable[Sequence[coordinator_pb.Member]], versions: AsyncIterable[HasVersion]
    ) -> None:
        """Follow both feeds, probe, and move requests off lost engines, until cancelled.

        Requests under way go on after that; `table.close` ends them.
        """
        async with asyncio.TaskGroup() as group:
            group.create_task(self.table.follow(members), name="members")
            group.create_task(self.versions.follow(versions), name="versions")
            group.create_task(self.prober.run(), name="probes")
            group.create_task(self.flights.move_off_lost_engines(), name="lost engines")
            group.create_task(self._show(), name="status")

    async def _show(self) -> None:
        """Keep the table in the status: how many engines take requests, and why each other one does not."""
        activity = self._board.activity("engines")
        while True:
            change = self.table.change()
            engines = self.table.engines
            reasons = {engine.engine_id: self.table.excluded_reason(engine) for engine in engines}
            routable = sum(not reason for reason in reasons.values())
            self._board.gauges["num_engines"] = len(engines)
            self._board.gauges["num_engines_routable"] = routable
            out = ", ".join(f"{engine_id} {reason}" for engine_id, reason in reasons.items() if reason)
            doing = f"{routable} of {len(engines)} engines take requests" + (f"; {out}" if out else "")
            if activity.doing != doing:
                activity.set(doing)
            if routable or not engines:
                activity.waiting_for = "" if engines else "an engine to join the run"
            else:
                activity.waiting_for = f"an engine that takes requests; {out}"
            await change.wait()
