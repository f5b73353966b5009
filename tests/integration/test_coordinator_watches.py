"""VersionWatch and MemberWatch go on over a coordinator that is killed, frozen or not there yet."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.ids import new_id
from paceline.rpc import errors
from paceline.rpc.client import open_channel
from paceline.rpc.members import MemberWatch
from paceline.rpc.membership import Membership
from paceline.rpc.status import StatusBoard
from paceline.testing.processes import service_process
from paceline.weights.watch import VersionWatch

RUN = "watched"
CALL = {"timeout": 20.0, "wait_for_ready": True}
RUN_FILE = f"""
[run]
name = "{RUN}"
[model]
path = "model"
[data]
source = {{name = "jsonl", path = "data.jsonl"}}
[[reward.graders]]
name = "exact_match"
"""


@pytest.fixture
async def coordinator(tmp_path: Path, redis_url: str, redis_client: Any) -> AsyncIterator[tuple[Any, Any]]:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE)
    async with service_process("coordinator", path, redis_url=redis_url) as (process, address):
        channel = open_channel(address)
        yield process, pb_grpc.CoordinatorServiceStub(channel)
        await channel.close()


async def publish(stub: Any, digest: str) -> int:
    """Publish as a new trainer each time."""
    acquire = pb.AcquireTrainerRequest(request_id=new_id(), run_id=RUN, incarnation=digest)
    fence = (await stub.AcquireTrainer(acquire, **CALL)).fence
    prepare = pb.PrepareVersionRequest(request_id=new_id(), run_id=RUN, fence=fence, digest=digest)
    number = (await stub.PrepareVersion(prepare, **CALL)).version.weight_version
    commit = pb.CommitVersionRequest(request_id=new_id(), run_id=RUN, fence=fence, weight_version=number, uri="/w")
    return (await stub.CommitVersion(commit, **CALL)).version.weight_version


async def test_versions_arrive_once_and_in_order_over_restarts(coordinator: tuple[Any, Any]) -> None:
    process, stub = coordinator
    board = StatusBoard("engine", "engine-0", "i", RUN)
    versions = VersionWatch(stub, RUN, board.activity("weights")).follow(1)
    seen: list[int] = []
    for n in range(1, 4):
        await publish(stub, f"before {n}")
        seen.append((await anext(versions)).weight_version)
        await process.kill()
        waiting = asyncio.ensure_future(anext(versions))
        async with asyncio.timeout(20):
            while not board.activity("weights").waiting_for:  # noqa: ASYNC110 - a status board has no event
                await asyncio.sleep(0.01)
        assert "coordinator" in board.activity("weights").waiting_for
        await process.start()
        await publish(stub, f"after {n}")
        seen.append((await waiting).weight_version)
    assert seen == [1, 2, 3, 4, 5, 6]
    newest = VersionWatch(stub, RUN, board.activity("second")).follow()
    assert (await anext(newest)).weight_version == 6


async def test_wrong_request_is_not_retried_for_ever(coordinator: tuple[Any, Any]) -> None:
    _, stub = coordinator
    board = StatusBoard("engine", "engine-0", "i", "../x")
    with pytest.raises(errors.InvalidArgument):
        await anext(VersionWatch(stub, "../x", board.activity("weights")).follow())


async def test_members_of_processes_are_seen_over_a_restart(coordinator: tuple[Any, Any]) -> None:
    process, stub = coordinator
    board = StatusBoard("engine", "engine-0", "first", RUN, state="READY")
    membership = Membership(stub, board, "127.0.0.1:7", {"zone": "a"}, lease_seconds=2.0)
    watcher = StatusBoard("router", "router-0", "r", RUN)
    memberships = aiter(MemberWatch(stub, RUN, "engine", watcher.activity("members")))

    async def until(expected: list[tuple[str, int]]) -> list[pb.Member]:
        while True:
            members = await anext(memberships)
            if [(item.member_id, item.weight_version) for item in members] == expected:
                return members

    await until([])
    task = asyncio.create_task(membership.run())
    member = (await until([("engine-0", 0)]))[0]
    assert (member.address, member.labels["zone"], member.state) == ("127.0.0.1:7", "a", "READY")
    await process.restart()
    board.weight_version = 3
    membership.report_now()
    await until([("engine-0", 3)])
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until([])


async def test_frozen_coordinator_does_not_expire_leases_when_it_thaws(coordinator: tuple[Any, Any]) -> None:
    process, stub = coordinator
    member = pb.Member(member_id="engine-0", service="engine", incarnation="a", address="x", state="READY")
    register = pb.RegisterMemberRequest(request_id=new_id(), run_id=RUN, member=member, lease_seconds=4)
    await stub.RegisterMember(register, **CALL)
    process.signal(signal.SIGSTOP)
    try:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.ListMembers(pb.ListMembersRequest(run_id=RUN), timeout=5.0)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    finally:
        process.signal(signal.SIGCONT)
    heartbeat = pb.HeartbeatRequest(run_id=RUN, member_id="engine-0", incarnation="a", state="READY")
    assert await stub.Heartbeat(heartbeat, **CALL)
