"""Step records and checkpoint manifests: the history that a resumed run and a late watcher see."""

from __future__ import annotations

import time

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.rpc import errors
from paceline.rpc.status import timestamp
from services.coordinator import runs
from services.coordinator.state import Transaction, View
from services.coordinator.versions import check_fence

RETAINED_MANIFESTS = 100


async def record(change: Transaction, request: pb.RecordStepRequest) -> pb.RecordStepResponse:
    """Store a record in place of any other of its kind, name and step. Training records need the trainer's fence."""
    item = pb.StepRecord()
    item.CopyFrom(request.record)
    if item.kind == pb.RECORD_KIND_UNSPECIFIED:
        raise errors.InvalidArgument(
            f"record of step {item.step} has no kind; set RECORD_KIND_TRAIN or RECORD_KIND_EVALUATION"
        )
    if item.step < 0:
        raise errors.InvalidArgument(f"step {item.step} is negative")
    if item.kind == pb.RECORD_KIND_TRAIN:
        await check_fence(change, request.fence)
    if not item.HasField("time"):
        item.time.CopyFrom(timestamp(time.time()))
    keys = change.keys
    field = f"{item.kind}/{item.step}/{item.name}"
    sequence = await change.number(keys.step_sequence) + 1
    change.write("SET", keys.step_sequence, sequence)
    change.store(item, keys.steps, field)
    change.write("ZADD", keys.step_order, item.step, field)
    change.write("ZADD", keys.step_log, sequence, field)
    run = await runs.load(change)
    if run is not None and item.kind == pb.RECORD_KIND_TRAIN:
        run.last_step = item.step
        change.store(run, keys.run)
    change.touch("steps")
    return pb.RecordStepResponse()


async def stored_fields(view: View, start: int) -> tuple[int, list[bytes]]:
    """The newest sequence number, and the fields of the records from step `start` on, by step."""
    sequence = await view.number(view.keys.step_sequence)
    return sequence, await view.read("ZRANGEBYSCORE", view.keys.step_order, start, "+inf")


async def fields_after(view: View, sequence: int) -> list[tuple[int, bytes]]:
    """(sequence, field) of what was recorded after `sequence`, in the order of recording."""
    fields = await view.read("ZRANGEBYSCORE", view.keys.step_log, f"({sequence}", "+inf")
    if not fields:
        return []
    scores = await view.read("ZMSCORE", view.keys.step_log, *fields)
    return sorted((int(score), field) for score, field in zip(scores, fields, strict=True) if score is not None)


async def commit_checkpoint(change: Transaction, request: pb.CommitCheckpointRequest) -> pb.CommitCheckpointResponse:
    """Record a manifest; one of the same step taken again after a rewind replaces the earlier."""
    await check_fence(change, request.fence)
    manifest = pb.CheckpointManifest()
    manifest.CopyFrom(request.manifest)
    if not manifest.uri or not manifest.digest:
        raise errors.InvalidArgument(f"manifest of step {manifest.step}: uri and digest must be set")
    keys = change.keys
    held = await change.message(pb.CheckpointManifest, keys.checkpoints, manifest.step)
    if held is not None and held.digest == manifest.digest:
        return pb.CommitCheckpointResponse()
    manifest.committed_time.CopyFrom(timestamp(time.time()))
    change.store(manifest, keys.checkpoints, manifest.step)
    change.write("ZADD", keys.checkpoint_order, manifest.step, manifest.step)
    dropped = await change.read("ZRANGE", keys.checkpoint_order, 0, -RETAINED_MANIFESTS - 1)
    if dropped:
        change.write("ZREM", keys.checkpoint_order, *dropped)
        change.write("HDEL", keys.checkpoints, *dropped)
    change.touch("run")
    return pb.CommitCheckpointResponse()


async def checkpoints(view: View) -> pb.ListCheckpointsResponse:
    """Manifests, newest first."""
    order = await view.read("ZREVRANGE", view.keys.checkpoint_order, 0, -1)
    manifests = await view.messages(pb.CheckpointManifest, view.keys.checkpoints, order)
    return pb.ListCheckpointsResponse(header=await view.header(), manifests=manifests)
