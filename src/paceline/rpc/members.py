"""The live members of a run, as every change makes them: what router, gateway and dashboard go by."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.rpc.following import STREAM_SECONDS, follow
from paceline.rpc.status import Activity


class MemberWatch:
    """Async iterator over whole memberships: `async for members in MemberWatch(stub, run_id, "engine", activity)`.

    The first list comes at once, then one after every change and about every 10 s. It goes on for ever: while the
    coordinator is away the activity says so and the last list stands. An empty service means all.
    """

    def __init__(self, stub: Any, run_id: str, service: str, activity: Activity) -> None:
        self._stub = stub
        self._request = pb.WatchMembersRequest(run_id=run_id, service=service)
        self._activity = activity
        self._what = service or "all"

    async def __aiter__(self) -> AsyncIterator[list[pb.Member]]:
        def open_stream() -> Any:
            return self._stub.WatchMembers(self._request, timeout=STREAM_SECONDS)

        async for response in follow(open_stream, self._activity, "coordinator, WatchMembers"):
            self._activity.set(f"watching members ({self._what}): {len(response.members)} live")
            yield list(response.members)
