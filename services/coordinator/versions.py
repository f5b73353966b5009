"""Weight versions: numbers that only go up, fenced by the trainer that may publish, visible once committed."""

from __future__ import annotations

import time

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.weights.v1 import weights_pb2
from paceline.rpc import errors
from paceline.rpc.status import timestamp
from services.coordinator.state import Transaction, View

RETAINED_VERSIONS = 10_000
RETAINED_REPORTS = 100


async def acquire(change: Transaction, request: pb.AcquireTrainerRequest) -> pb.AcquireTrainerResponse:
    """Issue the next fence and give up what an earlier trainer had prepared.

    Fences are at least the time in milliseconds, so that even a lost store never issues one a second time.
    """
    if not request.incarnation:
        raise errors.InvalidArgument("incarnation is empty; send the one of the trainer's process")
    fence = max(await change.number(change.keys.fence) + 1, int(time.time() * 1000))
    change.write("SET", change.keys.fence, fence)
    change.write("SET", change.keys.trainer, request.incarnation)
    await _abandon_prepared(change)
    change.touch("run")
    return pb.AcquireTrainerResponse(fence=fence, newest_version=await newest(change))


async def check_fence(view: View, fence: int) -> None:
    """Aborted unless `fence` is the one that AcquireTrainer issued last."""
    if fence <= 0:
        raise errors.InvalidArgument(f"fence {fence} is not one; call AcquireTrainer and send its fence")
    current = await view.number(view.keys.fence)
    if fence != current:
        holder = (await view.read("GET", view.keys.trainer) or b"nobody").decode()
        raise errors.Aborted(
            f"trainer fence {fence} of run {view.run_id!r} is not the current one ({current}, held by {holder}); "
            "another trainer took over or the store was lost: end, or start again and call AcquireTrainer"
        )


async def prepare(change: Transaction, request: pb.PrepareVersionRequest) -> pb.PrepareVersionResponse:
    """Reserve the next number, or return the newest committed version when its digest and step are equal.

    A step that changed nothing has the digest of the step before, and still needs a number: rollout goes by steps.
    """
    await check_fence(change, request.fence)
    if not request.digest:
        raise errors.InvalidArgument("digest is empty; send the content digest of the weights")
    latest = await newest(change)
    if latest is not None and (latest.digest, latest.step) == (request.digest, request.step):
        return pb.PrepareVersionResponse(version=latest, already_committed=True)
    await _abandon_prepared(change)
    number = max(await change.number(change.keys.version_counter), request.min_weight_version) + 1
    version = weights_pb2.WeightVersion(
        weight_version=number, step=request.step, digest=request.digest, kind=request.kind,
        state=weights_pb2.PUBLICATION_STATE_PREPARED, transport=request.transport,
        trainer_incarnation=(await change.read("GET", change.keys.trainer) or b"").decode(),
    )  # fmt: skip
    change.write("SET", change.keys.version_counter, number)
    change.write("SET", change.keys.prepared, number)
    change.write("HSET", change.keys.version_fences, number, request.fence)
    change.store(version, change.keys.versions, number)
    change.touch("run")
    return pb.PrepareVersionResponse(version=version)


async def commit(change: Transaction, request: pb.CommitVersionRequest) -> pb.CommitVersionResponse:
    """Make a prepared version visible. A repeat returns it as it is."""
    await check_fence(change, request.fence)
    number = request.weight_version
    version = await change.message(weights_pb2.WeightVersion, change.keys.versions, number)
    fence = int(await change.read("HGET", change.keys.version_fences, number) or 0)
    if version is None or fence != request.fence or version.state == weights_pb2.PUBLICATION_STATE_ABANDONED:
        state = "was never prepared" if version is None else f"was prepared under fence {fence} or given up"
        raise errors.FailedPrecondition(
            f"weight version {number} {state}; call PrepareVersion under fence {request.fence}"
        )
    if version.state == weights_pb2.PUBLICATION_STATE_COMMITTED:
        return pb.CommitVersionResponse(version=version)
    if not request.uri:
        raise errors.InvalidArgument(f"uri of weight version {number} is empty; say where engines find the files")
    version.state = weights_pb2.PUBLICATION_STATE_COMMITTED
    version.uri, version.num_bytes, version.traceparent = request.uri, request.num_bytes, request.traceparent
    version.committed_time.CopyFrom(timestamp(time.time()))
    change.store(version, change.keys.versions, number)
    change.write("ZADD", change.keys.committed, number, number)
    change.write("SET", change.keys.newest, number)
    change.write("DEL", change.keys.prepared)
    await _trim(change, await change.number(change.keys.newest), number)
    change.newest = number
    change.touch("versions")
    return pb.CommitVersionResponse(version=version)


async def report(change: Transaction, weights: weights_pb2.EngineWeights) -> None:
    """Record what an engine holds. InvalidArgument when an applied version has another digest than was published."""
    version = await _committed(change, weights.weight_version)
    if not weights.engine_id:
        raise errors.InvalidArgument("engine_id is empty; send the member id of the engine")
    if weights.applied and weights.digest != version.digest:
        raise errors.InvalidArgument(
            f"engine {weights.engine_id!r} holds digest {weights.digest!r} as weight version {version.weight_version}, "
            f"which was published as {version.digest!r}; the engine must load it again"
        )
    if version.weight_version <= await change.number(change.keys.newest) - RETAINED_REPORTS:
        return  # A late report would make a key anew that nothing removes.
    change.store(weights, change.keys.engines(version.weight_version), weights.engine_id)
    change.touch("engines")


async def get(view: View, number: int) -> pb.GetVersionResponse:
    """One version, 0 for the newest committed one, with the engines that reported on it, by id."""
    if number == 0:
        number = await view.number(view.keys.newest)
        if number == 0:
            raise errors.NotFound(f"run {view.run_id!r} has no committed weight version yet")
    version = await view.message(weights_pb2.WeightVersion, view.keys.versions, number)
    if version is None:
        newest_number = await view.number(view.keys.newest)
        raise errors.NotFound(f"run {view.run_id!r} has no weight version {number}; the newest is {newest_number}")
    engines = await view.all_messages(weights_pb2.EngineWeights, view.keys.engines(number))
    engines.sort(key=lambda item: item.engine_id)
    return pb.GetVersionResponse(header=await view.header(), version=version, engines=engines)


async def newest(view: View) -> weights_pb2.WeightVersion | None:
    """The newest committed version."""
    number = await view.number(view.keys.newest)
    return await view.message(weights_pb2.WeightVersion, view.keys.versions, number) if number else None


async def committed_from(view: View, start: int, count: int) -> list[weights_pb2.WeightVersion]:
    """Up to `count` committed versions from `start` on, in order. OutOfRange when `start` was trimmed."""
    trimmed = await view.number(view.keys.trimmed)
    if 0 < start <= trimmed:
        first = await view.read("ZRANGE", view.keys.committed, 0, 0)
        oldest = int(first[0]) if first else 0
        raise errors.OutOfRange(
            f"weight version {start} of run {view.run_id!r} was trimmed; the oldest kept is {oldest}"
        )
    numbers = await view.read("ZRANGEBYSCORE", view.keys.committed, start, "+inf", "LIMIT", 0, count)
    return await view.messages(weights_pb2.WeightVersion, view.keys.versions, [int(item) for item in numbers])


async def _committed(view: View, number: int) -> weights_pb2.WeightVersion:
    version = await view.message(weights_pb2.WeightVersion, view.keys.versions, number)
    if version is None or version.state != weights_pb2.PUBLICATION_STATE_COMMITTED:
        raise errors.NotFound(f"weight version {number} of run {view.run_id!r} was never published")
    return version


async def _abandon_prepared(change: Transaction) -> None:
    number = await change.number(change.keys.prepared)
    if not number:
        return
    version = await change.message(weights_pb2.WeightVersion, change.keys.versions, number)
    if version is not None and version.state == weights_pb2.PUBLICATION_STATE_PREPARED:
        version.state = weights_pb2.PUBLICATION_STATE_ABANDONED
        change.store(version, change.keys.versions, number)
    change.write("DEL", change.keys.prepared)


async def _trim(change: Transaction, before: int, number: int) -> None:
    """Remove what is kept no longer when `number` follows `before` as the newest version."""
    # Numbers that were given up leave gaps, so more than one version can leave the window at once.
    left = range(max(1, before - RETAINED_REPORTS + 1), min(before, number - RETAINED_REPORTS) + 1)
    if left:
        change.write("DEL", *map(change.keys.engines, left))
    excess = await change.read("ZCARD", change.keys.committed) + 1 - RETAINED_VERSIONS
    if excess <= 0:
        return
    numbers = [int(item) for item in await change.read("ZRANGE", change.keys.committed, 0, excess - 1)]
    change.write("ZREM", change.keys.committed, *numbers)
    change.write("HDEL", change.keys.versions, *numbers)
    change.write("HDEL", change.keys.version_fences, *numbers)
    change.write("SET", change.keys.trimmed, numbers[-1])
