"""Step records and the state of a run, followed over any number of coordinator restarts and resumes of the run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.rpc.following import STREAM_SECONDS, follow
from paceline.rpc.membership import RUN_ENDED
from paceline.rpc.status import Activity

_ENDED_SECONDS = 5.0


class StepWatch:
    """Follows the records of a run from `start_step` on, and its state.

    Every stream begins with all records again, as a resumed run may have replaced any of them while the stream was
    away: the same record can come more than once, and the last one counts. What keeps the watch from its stream stands
    in the activity.
    """

    def __init__(self, stub: Any, run_id: str, activity: Activity, start_step: int = 0) -> None:
        self._stub = stub
        self._request = pb.WatchStepsRequest(run_id=run_id, start_step=start_step)
        self._activity = activity
        self.run: pb.Run | None = None
        """The newest that was said of the run itself."""

    @property
    def ended(self) -> bool:
        """Whether the run has ended, for all that is known."""
        return self.run is not None and self.run.state in RUN_ENDED

    async def __aiter__(self) -> AsyncIterator[pb.WatchStepsResponse]:
        """Responses for ever: a run that has ended may be resumed."""
        while True:
            async for response in self.until_ended():
                yield response
            await asyncio.sleep(_ENDED_SECONDS)

    async def until_ended(self) -> AsyncIterator[pb.WatchStepsResponse]:
        """Responses up to the last record of the ended run."""

        def open_stream() -> Any:
            return self._stub.WatchSteps(self._request, timeout=STREAM_SECONDS)

        async for response in follow(open_stream, self._activity, "coordinator, WatchSteps", lambda: self.ended):
            if response.HasField("run"):
                self.run = response.run
            yield response
