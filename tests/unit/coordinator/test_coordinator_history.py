"""How far back the coordinator can go: trimmed versions are named, lost changes found when recent."""

from __future__ import annotations

import pytest
import redis.asyncio

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.weights.v1 import weights_pb2
from paceline.rpc import errors
from services.coordinator import versions, watches
from services.coordinator.recent import RecentChanges
from services.coordinator.state import Store


async def test_trimmed_versions_are_out_of_range(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "RETAINED_VERSIONS", 3)
    store = Store(redis_client)

    acquire = pb.AcquireTrainerRequest(incarnation="trainer")
    fence = (await store.change("run", lambda change: versions.acquire(change, acquire))).fence
    for n in range(1, 6):
        prepare = pb.PrepareVersionRequest(fence=fence, digest=f"d{n}")
        commit = pb.CommitVersionRequest(fence=fence, weight_version=n, uri="/w")
        await store.change("run", lambda change, request=prepare: versions.prepare(change, request))
        await store.change("run", lambda change, request=commit: versions.commit(change, request))
    watch = watches.watch_versions(store, "run", 3)
    assert [(await anext(watch)).version.weight_version for _ in range(3)] == [3, 4, 5]
    with pytest.raises(errors.OutOfRange, match=r"weight version 2 .* oldest kept is 3"):
        await anext(watches.watch_versions(store, "run", 2))


async def test_reports_on_versions_leave_with_them_over_gaps_too(
    redis_client: redis.asyncio.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "RETAINED_REPORTS", 2)
    store = Store(redis_client)
    acquire = pb.AcquireTrainerRequest(incarnation="trainer")
    fence = (await store.change("run", lambda change: versions.acquire(change, acquire))).fence

    async def publish(floor: int) -> None:
        prepare = pb.PrepareVersionRequest(fence=fence, digest=f"d{floor}", min_weight_version=floor)
        number = (await store.change("run", lambda change: versions.prepare(change, prepare))).version.weight_version
        commit = pb.CommitVersionRequest(fence=fence, weight_version=number, uri="/w")
        await store.change("run", lambda change: versions.commit(change, commit))
        await report(number, f"d{floor}")

    async def report(number: int, digest: str) -> None:
        weights = weights_pb2.EngineWeights(engine_id="engine-0", weight_version=number, digest=digest, applied=True)
        await store.change("run", lambda change: versions.report(change, weights))

    async def reported() -> list[int]:
        return sorted([int(key.rsplit(b":", 1)[1]) async for key in redis_client.scan_iter("*engines:*")])

    for floor in (0, 1, 2):
        await publish(floor)
    assert await reported() == [2, 3]
    await publish(5)  # version 6: 4 and 5 are never committed
    assert await reported() == [6]
    await report(2, "d1")
    assert await reported() == [6]


def test_recent_changes_are_given_back_only_without_a_gap() -> None:
    recent = RecentChanges()
    for revision in (4, 5, 6):
        recent.add(revision, [("SET", "key", revision)])
    assert recent.after(4) == [("SET", "key", 5), ("SET", "key", 6)]
    assert recent.after(6) == []
    assert recent.after(2) is None
    recent.forget(1)
    assert recent.revision == 1 and recent.after(1) == []
