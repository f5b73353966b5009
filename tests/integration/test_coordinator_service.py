"""The coordinator as a process over real Redis: what it promises must hold over kill -9, repeats and lost stores."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
import redis

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.ids import new_id
from paceline.rpc.client import open_channel
from paceline.testing.processes import ServiceProcess, service_process

pytestmark = pytest.mark.asyncio(loop_scope="module")
_numbers = itertools.count()
CALL = {"timeout": 20.0, "wait_for_ready": True}
RUN_FILE = """
[run]
name = "coordinated"
[model]
path = "model"
[data]
source = {name = "jsonl", path = "data.jsonl"}
[[reward.graders]]
name = "exact_match"
"""


@dataclass
class Service:
    """A coordinator process, a stub of it, and a run that no other test uses."""

    process: ServiceProcess
    stub: Any
    run_id: str

    async def acquire(self, incarnation: str = "trainer") -> int:
        request = pb.AcquireTrainerRequest(request_id=new_id(), run_id=self.run_id, incarnation=incarnation)
        return (await self.stub.AcquireTrainer(request, **CALL)).fence

    async def prepare(self, fence: int, digest: str, **fields: Any) -> pb.PrepareVersionResponse:
        request = pb.PrepareVersionRequest(
            request_id=new_id(), run_id=self.run_id, fence=fence, digest=digest, kind=weights_pb2.WEIGHT_KIND_FULL,
            transport="disk", **fields,
        )  # fmt: skip
        return await self.stub.PrepareVersion(request, **CALL)

    async def commit(self, fence: int, number: int) -> weights_pb2.WeightVersion:
        request = pb.CommitVersionRequest(
            request_id=new_id(),
            run_id=self.run_id,
            fence=fence,
            weight_version=number,
            uri=f"/weights/{number}",
            num_bytes=8,
        )
        return (await self.stub.CommitVersion(request, **CALL)).version

    async def publish(self, fence: int, digest: str) -> int:
        number = (await self.prepare(fence, digest)).version.weight_version
        return (await self.commit(fence, number)).weight_version

    async def register(
        self, member_id: str, incarnation: str, lease: float = 30.0, service: str = "engine"
    ) -> pb.Member:
        member = pb.Member(
            member_id=member_id, service=service, address="127.0.0.1:1", incarnation=incarnation, state="READY"
        )
        request = pb.RegisterMemberRequest(request_id=new_id(), run_id=self.run_id, member=member, lease_seconds=lease)
        return (await self.stub.RegisterMember(request, **CALL)).member

    async def heartbeat(self, member_id: str, incarnation: str, **fields: Any) -> pb.HeartbeatResponse:
        request = pb.HeartbeatRequest(run_id=self.run_id, member_id=member_id, incarnation=incarnation, **fields)
        return await self.stub.Heartbeat(request, **CALL)

    async def record(self, step: int, fence: int = 0, **values: float) -> None:
        kind = pb.RECORD_KIND_TRAIN if fence else pb.RECORD_KIND_EVALUATION
        request = pb.RecordStepRequest(
            request_id=new_id(),
            run_id=self.run_id,
            fence=fence,
            record=pb.StepRecord(step=step, kind=kind, values=values),
        )
        await self.stub.RecordStep(request, **CALL)

    def watch_versions(self, start: int) -> Any:
        return self.stub.WatchVersions(pb.WatchVersionsRequest(run_id=self.run_id, start_version=start), **CALL)

    def watch_members(self, service: str = "") -> Any:
        return self.stub.WatchMembers(pb.WatchMembersRequest(run_id=self.run_id, service=service), **CALL)


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("run") / "run.toml"
    path.write_text(RUN_FILE)
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def coordinator(run_file: Path, redis_url: str) -> AsyncIterator[Service]:
    async with service_process("coordinator", run_file, redis_url=redis_url) as (process, address):
        channel = open_channel(address)
        yield Service(process, pb_grpc.CoordinatorServiceStub(channel), "")
        await channel.close()


@pytest.fixture
def service(coordinator: Service) -> Service:
    """The coordinator, with a run of its own for each test."""
    return replace(coordinator, run_id=f"run-{next(_numbers)}")


async def code_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def take_versions(call: Any, count: int) -> list[int]:
    """Numbers of the next `count` versions of a watch, without its notes."""
    found: list[int] = []
    async for response in call:
        if response.HasField("version"):
            found.append(response.version.weight_version)
        if len(found) == count:
            return found
    return found


async def members_until(call: Any, expected: list[str]) -> list[pb.Member]:
    """Read a membership watch until it shows these ids."""
    async for response in call:
        if [member.member_id for member in response.members] == expected:
            return list(response.members)
    raise AssertionError(f"watch ended before {expected}")


async def test_version_numbers_go_on_after_kill(service: Service) -> None:
    fence = await service.acquire()
    assert [await service.publish(fence, f"d{n}") for n in range(1, 8)] == [1, 2, 3, 4, 5, 6, 7]
    await service.process.restart()
    fence = await service.acquire("next trainer")
    assert await service.publish(fence, "d8") == 8
    response = await service.stub.GetVersion(pb.GetVersionRequest(run_id=service.run_id), **CALL)
    assert (response.version.weight_version, response.version.trainer_incarnation) == (8, "next trainer")


async def test_older_fence_cannot_publish(service: Service) -> None:
    first = await service.acquire("first")
    reserved = (await service.prepare(first, "half")).version.weight_version
    second = await service.acquire("second")
    assert second > first
    code, text = await code_of(service.commit(first, reserved))
    assert code == grpc.StatusCode.ABORTED and "second" in text
    assert (await code_of(service.prepare(first, "x")))[0] == grpc.StatusCode.ABORTED
    given_up = await service.stub.GetVersion(
        pb.GetVersionRequest(run_id=service.run_id, weight_version=reserved), **CALL
    )
    assert given_up.version.state == weights_pb2.PUBLICATION_STATE_ABANDONED
    assert (await code_of(service.commit(second, reserved)))[0] == grpc.StatusCode.FAILED_PRECONDITION
    assert await service.publish(second, "half") == reserved + 1


async def test_equal_digest_and_step_are_the_same_version(service: Service) -> None:
    fence = await service.acquire()
    number = await service.publish(fence, "same")
    fence = await service.acquire("replaying trainer")
    again = await service.prepare(fence, "same")
    assert (again.version.weight_version, again.already_committed) == (number, True)
    unchanged = await service.prepare(fence, "same", step=1)
    assert (unchanged.version.weight_version, unchanged.already_committed) == (number + 1, False)
    assert await service.publish(fence, "other") == number + 2


async def test_repeated_requests_get_the_first_answer(service: Service) -> None:
    fence = await service.acquire()
    request = pb.PrepareVersionRequest(request_id="prepare-1", run_id=service.run_id, fence=fence, digest="d")
    first = await service.stub.PrepareVersion(request, **CALL)
    await service.process.restart()
    assert await service.stub.PrepareVersion(request, **CALL) == first
    request.digest = "another"
    code, text = await code_of(service.stub.PrepareVersion(request, **CALL))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "prepare-1" in text
    number = first.version.weight_version
    assert await service.commit(fence, number) == await service.commit(fence, number)


async def test_lost_store_never_reuses_a_number(service: Service, redis_url: str) -> None:
    fence = await service.acquire()
    for n in range(3):
        await service.publish(fence, f"d{n}")
    await service.process.kill()
    redis.Redis.from_url(redis_url).flushall()
    await service.process.start()
    assert (await code_of(service.prepare(fence, "x")))[0] == grpc.StatusCode.ABORTED
    later = await service.acquire("restarted")
    assert later > fence
    assert (await service.prepare(later, "x", min_weight_version=3)).version.weight_version == 4


async def test_store_that_forgot_the_latest_changes_gets_them_back(service: Service, redis_url: str) -> None:
    fence = await service.acquire()
    await service.publish(fence, "kept")
    client = redis.Redis.from_url(redis_url)
    earlier = {key: client.dump(key) for key in client.scan_iter()}
    await service.publish(fence, "lost")
    await service.record(1, fence, loss=0.5)
    client.flushall()
    for key, value in earlier.items():
        client.restore(key, 0, value)
    assert await service.publish(fence, "next") == 3
    assert await take_versions(service.watch_versions(1), 3) == [1, 2, 3]
    call = service.stub.WatchSteps(pb.WatchStepsRequest(run_id=service.run_id), **CALL)
    assert (await anext(aiter(call))).record.values["loss"] == 0.5


async def test_watch_survives_restarts_without_gap_or_duplicate(service: Service) -> None:
    fence = await service.acquire()
    seen: list[int] = []
    for n in range(1, 4):
        await service.publish(fence, f"a{n}")
        call = service.watch_versions(seen[-1] + 1 if seen else 1)
        seen += await take_versions(call, 1)
        await service.publish(fence, f"b{n}")
        seen += await take_versions(call, 1)
        await service.process.restart()
    assert seen == [1, 2, 3, 4, 5, 6]
    assert await take_versions(service.watch_versions(0), 1) == [6]
    assert await take_versions(service.watch_versions(2), 5) == [2, 3, 4, 5, 6]


async def test_watch_without_versions_says_that_it_is_there(service: Service) -> None:
    call = service.watch_versions(0)
    note = await anext(aiter(call))
    assert note.header.run_id == service.run_id and not note.HasField("version")


async def test_engine_reports(service: Service) -> None:
    fence = await service.acquire()
    number = await service.publish(fence, "good")

    def report(**fields: Any) -> Any:
        weights = weights_pb2.EngineWeights(engine_id="engine-0", weight_version=number, **fields)
        return service.stub.ReportWeights(
            pb.ReportWeightsRequest(request_id=new_id(), run_id=service.run_id, weights=weights), **CALL
        )

    code, text = await code_of(report(digest="bad", applied=True))
    assert code == grpc.StatusCode.INVALID_ARGUMENT and "'bad'" in text and "'good'" in text
    await report(digest="", applied=False, error="no space")
    await report(digest="good", applied=True)
    response = await service.stub.GetVersion(pb.GetVersionRequest(run_id=service.run_id, weight_version=number), **CALL)
    assert [(item.engine_id, item.applied) for item in response.engines] == [("engine-0", True)]


async def test_lease_expiry_is_pushed(service: Service) -> None:
    await service.register("engine-0", "a")
    call = service.watch_members("engine")
    await members_until(call, ["engine-0"])
    await service.register("engine-1", "b", lease=1.0)
    await members_until(call, ["engine-0", "engine-1"])
    await members_until(call, ["engine-0"])
    assert (await code_of(service.heartbeat("engine-1", "b")))[0] == grpc.StatusCode.NOT_FOUND


async def test_heartbeat_change_is_pushed_and_takeover_ends_the_elder(service: Service) -> None:
    await service.register("engine-0", "elder")
    call = service.watch_members()
    await members_until(call, ["engine-0"])
    await service.heartbeat("engine-0", "elder", state="UPDATING", weight_version=3, gauges={"running": 2})
    member = (await members_until(call, ["engine-0"]))[0]
    assert (member.state, member.weight_version, member.gauges["running"]) == ("UPDATING", 3, 2)
    await service.register("engine-0", "younger")
    assert (await members_until(call, ["engine-0"]))[0].incarnation == "younger"
    assert (await code_of(service.heartbeat("engine-0", "elder")))[0] == grpc.StatusCode.ABORTED
    assert (await code_of(service.register("engine-0", "elder")))[0] == grpc.StatusCode.ABORTED
    leave = pb.DeregisterMemberRequest(
        request_id=new_id(), run_id=service.run_id, member_id="engine-0", incarnation="elder"
    )
    await service.stub.DeregisterMember(leave, **CALL)
    listed = await service.stub.ListMembers(pb.ListMembersRequest(run_id=service.run_id), **CALL)
    assert [item.incarnation for item in listed.members] == ["younger"]


async def test_leases_get_grace_after_a_restart(service: Service) -> None:
    # Longer than a restart and a new connection take on a busy machine, as nobody renews it meanwhile.
    before = await service.register("engine-0", "a", lease=60.0)
    await service.process.restart()
    call = service.watch_members()
    async for response in call:
        member = response.members[0]
        if member.lease_expiry_time.ToNanoseconds() > before.lease_expiry_time.ToNanoseconds():
            break
    assert (await service.heartbeat("engine-0", "a", state="READY")).run_state == pb.RUN_STATE_UNSPECIFIED


async def test_run_is_created_resumed_and_finished(service: Service) -> None:
    def create(digest: str, resume: bool = False) -> Any:
        return service.stub.CreateRun(
            pb.CreateRunRequest(
                request_id=new_id(), run_id=service.run_id, config_digest=digest, num_steps=4, resume=resume
            ),
            **CALL,
        )

    code, text = await code_of(service.stub.GetRun(pb.GetRunRequest(run_id="other"), **CALL))
    assert code == grpc.StatusCode.NOT_FOUND and "other" in text
    assert (await create("c1")).created
    assert not (await create("c1")).created
    code, text = await code_of(create("c2"))
    assert code == grpc.StatusCode.FAILED_PRECONDITION and "c1" in text and "c2" in text
    _, text = await code_of(service.stub.GetRun(pb.GetRunRequest(run_id="other"), **CALL))
    assert service.run_id in text
    await service.acquire()
    watch = service.watch_versions(0)
    finish = pb.FinishRunRequest(request_id=new_id(), run_id=service.run_id, state=pb.RUN_STATE_FINISHED)
    await service.stub.FinishRun(finish, **CALL)
    assert await take_versions(watch, 1) == []
    await service.process.restart()
    assert (await code_of(create("c1")))[0] == grpc.StatusCode.FAILED_PRECONDITION
    resumed = await create("c2", resume=True)
    assert (resumed.run.state, resumed.run.config_digest) == (pb.RUN_STATE_ACTIVE, "c2")


async def test_step_records_are_replayed_and_replaced(service: Service) -> None:
    fence = await service.acquire()
    create = pb.CreateRunRequest(request_id=new_id(), run_id=service.run_id, config_digest="c")
    await service.stub.CreateRun(create, **CALL)
    for step in (1, 2, 3):
        await service.record(step, fence, loss=step)
    call = service.stub.WatchSteps(pb.WatchStepsRequest(run_id=service.run_id, start_step=2), **CALL)
    seen: list[tuple[int, float]] = []

    async def until(step: int, loss: float) -> None:
        async for response in call:
            if response.HasField("record"):
                seen.append((response.record.step, response.record.values["loss"]))
                if seen[-1] == (step, loss):
                    return

    await until(3, 3)
    await service.record(2, fence, loss=20)
    await until(2, 20)
    assert seen == [(2, 2), (3, 3), (2, 20)]
    assert (await code_of(service.record(4, fence - 1, loss=1)))[0] == grpc.StatusCode.ABORTED
    await service.record(4, loss=9)
    await service.process.restart()
    call = service.stub.WatchSteps(pb.WatchStepsRequest(run_id=service.run_id), **CALL)
    seen.clear()
    await until(4, 9)
    assert seen == [(1, 1), (2, 20), (3, 3), (4, 9)]
    run = (await service.stub.GetRun(pb.GetRunRequest(run_id=service.run_id), **CALL)).run
    assert run.last_step == 2


async def test_checkpoints_are_listed_newest_first(service: Service) -> None:
    fence = await service.acquire()

    async def commit(step: int, digest: str, fence: int = fence) -> None:
        manifest = pb.CheckpointManifest(step=step, uri=f"/c/{step}", digest=digest, weight_version=step + 1)
        await service.stub.CommitCheckpoint(
            pb.CommitCheckpointRequest(request_id=new_id(), run_id=service.run_id, fence=fence, manifest=manifest),
            **CALL,
        )

    for step, digest in ((2, "a"), (10, "b"), (10, "b"), (4, "c")):
        await commit(step, digest)
    assert (await code_of(commit(12, "d", fence - 1)))[0] == grpc.StatusCode.ABORTED
    await service.process.restart()
    listed = await service.stub.ListCheckpoints(pb.ListCheckpointsRequest(run_id=service.run_id), **CALL)
    assert [(item.step, item.digest) for item in listed.manifests] == [(10, "b"), (4, "c"), (2, "a")]


async def test_barrier_names_who_is_missing_and_survives_a_restart(service: Service) -> None:
    await service.register("engine-0", "a")
    await service.register("engine-1", "b")

    def enter(member_id: str, count: int = 2, timeout: float = 20.0) -> Any:
        request = pb.EnterBarrierRequest(
            run_id=service.run_id, barrier="start", member_id=member_id, num_participants=count
        )
        return service.stub.EnterBarrier(request, timeout=timeout, wait_for_ready=True)

    code, text = await code_of(enter("engine-0", timeout=1.5))
    assert code == grpc.StatusCode.DEADLINE_EXCEEDED and "engine-1" in text and "1 of 2" in text
    await service.process.restart()
    assert list((await enter("engine-1")).member_ids) == ["engine-0", "engine-1"]
    assert list((await enter("engine-0")).member_ids) == ["engine-0", "engine-1"]
    assert (await code_of(enter("engine-2", count=3)))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_unsafe_names_are_refused(service: Service) -> None:
    for call in (
        service.stub.GetVersion(pb.GetVersionRequest(run_id="../x"), **CALL),
        service.stub.ListMembers(pb.ListMembersRequest(run_id=""), **CALL),
        service.stub.AcquireTrainer(pb.AcquireTrainerRequest(run_id=service.run_id, incarnation="a"), **CALL),
    ):
        assert (await code_of(call))[0] == grpc.StatusCode.INVALID_ARGUMENT


async def test_unreachable_store_is_unavailable(run_file: Path) -> None:
    async with service_process("coordinator", run_file, redis_url="redis://127.0.0.1:9/0") as (_, address):
        channel = open_channel(address)
        stub = pb_grpc.CoordinatorServiceStub(channel)
        code, text = await code_of(stub.GetRun(pb.GetRunRequest(run_id="run"), timeout=20))
        await channel.close()
    assert code == grpc.StatusCode.UNAVAILABLE and "Redis" in text


async def test_stop_is_orderly_with_watchers(service: Service) -> None:
    call = service.watch_members()
    await members_until(call, [])
    assert await service.process.stop() == 0
    code, _ = await code_of(members_until(call, ["nobody"]))
    assert code == grpc.StatusCode.UNAVAILABLE
    await service.process.start()


async def test_concurrent_changes_are_one_after_the_other(service: Service) -> None:
    fences = await asyncio.gather(*(service.acquire(f"t{n}") for n in range(8)))
    assert len(set(fences)) == 8
    newest = max(fences)
    assert await service.publish(newest, "d") == 1
