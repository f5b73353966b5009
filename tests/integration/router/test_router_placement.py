"""Requests go evenly to engines that serve the weights asked for, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.testing.scripted_engine import ScriptedEngine, hashed


def _exact(version: int) -> generation_pb.VersionGate:
    return generation_pb.VersionGate(exact_version=version)


def _at_least(version: int) -> generation_pb.VersionGate:
    return generation_pb.VersionGate(min_version=version)


async def _hold(router: Any, count: int, num_samples: int = 1, **fields: Any) -> list[asyncio.Task[Any]]:
    """Start requests that engines hold back."""
    for engine in router.engines:
        engine.tokens.clear()
    before = sum(len(engine.requests) for engine in router.engines)
    tasks = [asyncio.create_task(router.generate(router.request(num_samples, **fields))) for _ in range(count)]
    async with asyncio.timeout(10):
        while sum(len(engine.requests) for engine in router.engines) < before + count:
            await asyncio.wait(tasks, timeout=0.01)
    return tasks


async def _let_go(router: Any, tasks: list[asyncio.Task[Any]]) -> list[Any]:
    for engine in router.engines:
        engine.tokens.set()
    return await asyncio.gather(*tasks)


async def test_tokens_pass_unchanged(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        await router.join(ScriptedEngine("engine-0"))
        answer = await router.generate(router.request(3))
        for index in range(3):
            assert answer.tokens[index] == hashed()([1, 2, 3], 10 + index, 1)
            assert answer.versions[index] == [1] * 8
        assert answer.reasons() == [generation_pb.FINISH_REASON_STOP] * 3


async def test_load_is_even_within_one_request(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        await router.join(*(ScriptedEngine(f"engine-{number}") for number in range(3)))
        await router.routable("engine-0", "engine-1", "engine-2")
        tasks = await _hold(router, 10)
        held = [rank.num_in_flight for rank in router.router.table.ranks]
        assert sum(held) == 10
        assert max(held) - min(held) <= 1
        await _let_go(router, tasks)
        assert [rank.num_in_flight for rank in router.router.table.ranks] == [0, 0, 0]


async def test_load_counts_samples_not_requests(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        await router.join(ScriptedEngine("engine-0"), ScriptedEngine("engine-1"))
        await router.routable("engine-0", "engine-1")
        tasks = await _hold(router, 1, num_samples=4)
        tasks += await _hold(router, 4)
        counts = sorted(len(engine.requests) for engine in router.engines)
        assert counts == [1, 4]
        await _let_go(router, tasks)


async def test_one_after_another_goes_round(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        await router.join(ScriptedEngine("engine-0"), ScriptedEngine("engine-1"))
        await router.routable("engine-0", "engine-1")
        for _ in range(6):
            await router.generate(router.request())
        assert [len(engine.requests) for engine in router.engines] == [3, 3]


async def test_a_session_stays_on_its_engine_until_that_is_gone(run_router: Callable[..., Any]) -> None:
    async with run_router(policy={"name": "session_sticky"}) as router:
        await router.publish(1)
        await router.join(*(ScriptedEngine(f"engine-{number}") for number in range(3)))
        await router.routable("engine-0", "engine-1", "engine-2")
        homes = set()
        for number in range(9):
            answer = await router.generate(router.request(session_id="s"))
            homes |= answer.engines
            await router.generate(router.request(session_id=f"other-{number}"))
        assert len(homes) == 1
        home = homes.pop()
        rest = [engine for engine in router.engines if engine.engine_id != home]
        await router.tell([engine.member() for engine in rest])
        await router.routable(*(engine.engine_id for engine in rest))
        moved = [(await router.generate(router.request(session_id="s"))).engines for _ in range(3)]
        assert moved[0] == moved[1] == moved[2] != {home}


async def test_a_request_waits_for_its_version_and_says_so(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(4)
        engine = ScriptedEngine("engine-0", weight_version=4)
        await router.join(engine)
        await router.routable("engine-0")
        task = asyncio.create_task(router.generate(router.request(gate=_at_least(5))))
        activity = router.board.activity("queue")
        async with asyncio.timeout(10):
            while not activity.waiting_for:
                await asyncio.wait([task], timeout=0.01)
        assert activity.waiting_for == "weight version >= 5; engine-0 serves 4"
        listed = await router.stub.ListEngines(router_list(), timeout=5)
        assert listed.num_waiting == 1
        await router.publish(5)
        engine.set_version(5)
        await router.tell()
        assert (await task).versions[0] == [5] * 8
        assert activity.waiting_for == ""


def router_list() -> Any:
    from paceline.api.router.v1 import router_service_pb2 as pb

    return pb.ListEnginesRequest()


async def test_the_deadline_says_which_version_was_wanted(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(5)
        await router.publish(4)
        await router.join(ScriptedEngine("engine-0", weight_version=4), ScriptedEngine("engine-1", state="SYNCING"))
        await router.routable("engine-0")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router.request(gate=_exact(5)), timeout=0.5)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        details = caught.value.details() or ""
        assert "wants weight version 5; engine-0 serves 4, engine-1 is SYNCING" in details


async def test_an_exact_version_that_is_past_fails_at_once(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(5)
        await router.join(ScriptedEngine("engine-0", weight_version=5))
        await router.routable("engine-0")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router.request(gate=_exact(4)))
        assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
        assert "weight version 4 can no longer be served" in (caught.value.details() or "")


async def test_an_engine_that_left_the_version_meanwhile_is_not_the_end(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(4)
        first, second = (ScriptedEngine(f"engine-{number}", weight_version=4) for number in range(2))
        await router.join(first, second)
        await router.routable("engine-0", "engine-1")
        first.board.weight_version = 5
        for _ in range(4):
            answer = await router.generate(router.request(gate=_exact(4)))
            assert answer.engines == {"engine-1"}
        assert router.reason("engine-0") == ""


async def test_dp_ranks_are_places_of_their_own(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        await router.join(ScriptedEngine("engine-0", dp_size=2))
        await router.routable("engine-0")
        tasks = await _hold(router, 4)
        listed = await router.stub.ListEngines(router_list(), timeout=5)
        assert [(item.engine_id, item.dp_rank, item.num_in_flight) for item in listed.engines] == [
            ("engine-0", 0, 2), ("engine-0", 1, 2),
        ]  # fmt: skip
        await _let_go(router, tasks)


async def test_a_full_queue_refuses_with_a_delay(run_router: Callable[..., Any]) -> None:
    async with run_router(max_waiting=2) as router:
        tasks = [asyncio.create_task(router.generate(router.request(), timeout=20)) for _ in range(2)]
        async with asyncio.timeout(10):
            while router.router.placement.num_waiting < 2:
                await asyncio.wait(tasks, timeout=0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router.request())
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "paceline-retry-delay-seconds" in dict(caught.value.trailing_metadata() or ())
        await router.publish(1)
        await router.join(ScriptedEngine("engine-0"))
        assert len(await asyncio.gather(*tasks)) == 2


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"seeds": []}, "seeds"),
        ({"max_new_tokens": 0}, "max_new_tokens = 0"),
        ({"prompt": ()}, "prompt_token_ids"),
        ({"request_id": ""}, "request_id"),
        ({"run_id": "other"}, "'other'"),
    ],
)
async def test_a_wrong_request_is_refused_by_name(
    run_router: Callable[..., Any], fields: dict[str, Any], named: str
) -> None:
    async with run_router() as router:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router.request(**fields))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert named in (caught.value.details() or "")
