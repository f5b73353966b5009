"""How far back the coordinator can go: trimmed versions are named, lost changes found when recent."""

from __future__ import annotations

import pytest
import redis.asyncio

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
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


def test_recent_changes_are_given_back_only_without_a_gap() -> None:
    recent = RecentChanges()
    for revision in (4, 5, 6):
        recent.add(revision, [("SET", "key", revision)])
    assert recent.after(4) == [("SET", "key", 5), ("SET", "key", 6)]
    assert recent.after(6) == []
    assert recent.after(2) is None
    recent.forget(1)
    assert recent.revision == 1 and recent.after(1) == []
