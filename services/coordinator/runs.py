"""Runs: created once, resumed only when asked to, ended once."""

from __future__ import annotations

import time

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.rpc import errors
from paceline.rpc.membership import RUN_ENDED
from paceline.rpc.status import timestamp
from services.coordinator.state import Store, Transaction, View

_TOPICS = ("run", "versions", "members", "steps")


async def load(view: View) -> pb.Run | None:
    """The run, None before it was created."""
    return await view.message(pb.Run, view.keys.run)


async def has_ended(view: View) -> bool:
    """Whether the run was created and has ended."""
    run = await load(view)
    return run is not None and run.state in RUN_ENDED


async def missing(store: Store, run_id: str) -> errors.NotFound:
    """The error for a run that nobody created."""
    names = [name for name in await store.runs() if await store.read(name, load) is not None]
    return errors.NotFound(f"run {run_id!r} does not exist; there are: {', '.join(names) or 'none'}")


async def create(change: Transaction, request: pb.CreateRunRequest) -> pb.CreateRunResponse:
    """Create the run or go on with it.

    FailedPrecondition for another configuration, or a run that has ended, without `resume`.
    """
    run = await load(change)
    created = run is None
    if run is None:
        run = pb.Run(run_id=request.run_id, created_time=timestamp(time.time()))
    elif not request.resume:
        _refuse_other(run, request)
    if created or request.resume:
        run.state = pb.RUN_STATE_ACTIVE
        run.config_digest, run.num_steps, run.reason = request.config_digest, request.num_steps, ""
        run.ClearField("finished_time")
        _save(change, run)
    return pb.CreateRunResponse(run=run, created=created)


def _refuse_other(run: pb.Run, request: pb.CreateRunRequest) -> None:
    if run.config_digest != request.config_digest:
        raise errors.FailedPrecondition(
            f"run {run.run_id!r} exists with configuration {run.config_digest}, not {request.config_digest}; "
            "resume it to accept the change, or choose another run.name"
        )
    if run.state in RUN_ENDED:
        state = pb.RunState.Name(run.state).removeprefix("RUN_STATE_")
        raise errors.FailedPrecondition(
            f"run {run.run_id!r} has ended ({state}: {run.reason or 'no reason given'}); "
            "resume it, or choose another run.name"
        )


async def finish(change: Transaction, request: pb.FinishRunRequest) -> pb.FinishRunResponse | None:
    """End the run; None when it does not exist. The first end stands."""
    if request.state not in RUN_ENDED:
        raise errors.InvalidArgument(
            f"state {request.state} does not end a run; use RUN_STATE_FINISHED, RUN_STATE_FAILED or RUN_STATE_STOPPED"
        )
    run = await load(change)
    if run is None:
        return None
    if run.state not in RUN_ENDED:
        run.state, run.reason = request.state, request.reason
        run.finished_time.CopyFrom(timestamp(time.time()))
        _save(change, run)
    return pb.FinishRunResponse(run=run)


def _save(change: Transaction, run: pb.Run) -> None:
    change.store(run, change.keys.run)
    for topic in _TOPICS:
        change.touch(topic)
