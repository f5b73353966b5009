"""The newest weight version, as the coordinator publishes it."""

from __future__ import annotations

from collections.abc import AsyncIterator

from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.bell import Bell
from paceline.rpc.status import Activity, StatusBoard


class NewestVersion:
    """Holds the newest committed version and rings the bell when there is a newer one."""

    def __init__(self, bell: Bell, status: StatusBoard) -> None:
        self._bell = bell
        self._status = status
        self.current: WeightVersion | None = None

    async def follow(self, versions: AsyncIterator[WeightVersion]) -> None:
        """Take over every version of a watch, for ever."""
        async for version in versions:
            self.current = version
            self._status.weight_version = version.weight_version
            self._bell.ring()

    async def first(self, activity: Activity) -> WeightVersion:
        """The newest version; waits for the very first one."""
        while True:
            ticket = self._bell.ticket()
            if self.current is not None:
                return self.current
            with activity.waiting("the first weights from the trainer"):
                await ticket.wait()
