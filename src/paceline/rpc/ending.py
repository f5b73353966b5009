"""How a process that nobody supervises learns that its run is over and will not come back."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc.aio

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.rpc.following import STREAM_SECONDS
from paceline.rpc.membership import RUN_ENDED
from paceline.rpc.status import Activity

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
    run = pb.Run()
    gone_since: float | None = None
    while True:
        request = pb.WatchStepsRequest(run_id=run_id, start_step=_NO_STEP)
        try:
            async for response in stub.WatchSteps(request, timeout=STREAM_SECONDS):
                gone_since = None
                if response.HasField("run"):
                    run = response.run
                    activity.set(f"the run is {_state(run)}")
            cause = "the coordinator, to say more of the run"
        except grpc.aio.AioRpcError as error:
            cause = f"the coordinator: {error.code().name}"
            if error.code() is grpc.StatusCode.UNAVAILABLE and run.state in RUN_ENDED:
                gone_since = gone_since or time.monotonic()
        if run.state == pb.RUN_STATE_STOPPED:
            return f"run {run_id!r} was taken down"
        if gone_since is not None and time.monotonic() - gone_since >= gone_seconds:
            return f"run {run_id!r} is {_state(run)} and its coordinator has gone"
        with activity.waiting(cause, _PAUSE_SECONDS):
            await asyncio.sleep(_PAUSE_SECONDS)


def _state(run: pb.Run) -> str:
    return pb.RunState.Name(run.state).removeprefix("RUN_STATE_").lower()
