"""How a process that nobody supervises learns that its run is over and will not come back."""

from __future__ import annotations

import asyncio
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.rpc.status import Activity
from paceline.rpc.steps import StepWatch

GONE_SECONDS = 10.0
"""A coordinator that is away for this long after the run has ended was taken down with it."""
_PAUSE_SECONDS = 1.0
_NO_STEP = 2**62
"""A watch from here on sends no records, only the state of the run."""


async def run_is_over(stub: Any, run_id: str, activity: Activity, gone_seconds: float = GONE_SECONDS) -> str:
    """Return, with the reason as a sentence, once nothing more can come of the run; until then wait.

    That is when whoever ran it has taken it down (RUN_STATE_STOPPED), or when it has ended otherwise and then its
    coordinator went away. A run that has finished may still be served, and a coordinator that is away during a run
    comes back, so neither alone is an end.
    """
    watch = StepWatch(stub, run_id, activity, _NO_STEP)
    now = asyncio.get_running_loop().time
    while True:
        try:
            async with asyncio.timeout(gone_seconds if watch.ended else None) as limit:
                async for _ in watch.until_ended():
                    limit.reschedule(now() + gone_seconds if watch.ended else None)
                    activity.set(f"the run is {_state(watch.run)}")
        except TimeoutError:
            return f"run {run_id!r} is {_state(watch.run)} and its coordinator has gone"
        if watch.run is not None and watch.run.state == pb.RUN_STATE_STOPPED:
            return f"run {run_id!r} was taken down"
        with activity.waiting("the coordinator, to say more of the run", _PAUSE_SECONDS):
            await asyncio.sleep(_PAUSE_SECONDS)


def _state(run: pb.Run | None) -> str:
    return pb.RunState.Name(run.state).removeprefix("RUN_STATE_").lower() if run is not None else "not known yet"
