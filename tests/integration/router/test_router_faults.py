"""Engines that die, hang, lie or refuse: no sample is lost, none is sent twice, and nobody waits in silence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
import pytest

from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.router.v1 import router_service_pb2 as pb
from paceline.testing.scripted_engine import ScriptedEngine, hashed

STOP, ABORT = generation_pb.FINISH_REASON_STOP, generation_pb.FINISH_REASON_ABORT


async def _two_engines(router: Any, **fields: Any) -> tuple[ScriptedEngine, ScriptedEngine]:
    await router.publish(1)
    first, second = ScriptedEngine("engine-0", **fields), ScriptedEngine("engine-1", **fields)
    await router.join(first, second)
    await router.routable("engine-0", "engine-1")
    return first, second


@pytest.mark.parametrize("stream", [False, True])
async def test_a_death_in_midstream_loses_and_repeats_nothing(run_router: Callable[..., Any], stream: bool) -> None:
    def uneven(prompt: Any, seed: int, weight_version: int) -> Any:
        return hashed(2 if seed % 2 else 9)(prompt, seed, weight_version)

    async with run_router() as router:
        first, second = await _two_engines(router, script=uneven)
        first.faults.die_midstream = 17
        answer = await router.generate(router.request(4, stream=stream))
        assert answer.engines == {"engine-0", "engine-1"}
        for index in range(4):
            assert answer.tokens[index] == uneven([1, 2, 3], 10 + index, 1)
            assert len(answer.logprobs[index]) == len(answer.tokens[index]) == len(answer.versions[index])
            assert answer.text[index] == "".join(f"{token} " for token in answer.tokens[index])
        assert answer.reasons() == [STOP] * 4
        assert list(second.requests[0].seeds) == [10, 12]
        assert second.requests[0].request_id == first.requests[0].request_id + "#2"
        assert router.reason("engine-0").startswith("is unhealthy")


async def test_a_prefix_of_other_weights_ends_as_aborted(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        first, second = await _two_engines(router)
        first.faults.die_midstream = 3
        await router.publish(2)
        second.set_version(2)
        await router.tell()
        await router.wait(lambda: router.router.table.engines[1].weight_version == 2)
        answer = await router.generate(router.request(1, stream=True))
        assert answer.tokens[0] == hashed()([1, 2, 3], 10, 1)[:3]
        assert answer.reasons() == [ABORT]
        assert answer.finishes[0][0].num_generated_tokens == 3
        assert second.requests == []


async def test_a_repeat_with_other_tokens_ends_as_aborted(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        first, second = await _two_engines(router)
        first.faults.die_midstream = 3
        second.script = hashed(vocabulary=7)
        answer = await router.generate(router.request(1, stream=True))
        assert answer.tokens[0] == hashed()([1, 2, 3], 10, 1)[:3]
        assert answer.reasons() == [ABORT]


async def test_the_only_engine_comes_back_as_another(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        first = ScriptedEngine("engine-0")
        await router.join(first)
        await router.routable("engine-0")
        first.faults.die_midstream = 5
        task = asyncio.create_task(router.generate(router.request(2)))
        await router.wait(lambda: router.reason("engine-0") != "")
        again = ScriptedEngine("engine-0")
        router.engines.remove(first)
        await again.start(first.address)
        await router.join(again)
        answer = await task
        assert answer.reasons() == [STOP] * 2
        assert len(again.requests) == 1


async def test_a_recovered_engine_gets_nothing_before_it_holds_a_published_version(
    run_router: Callable[..., Any],
) -> None:
    """Case A03: B comes back with weights labelled "default" (0), then with a number that was never published."""
    async with run_router(probe_every_seconds=0.05) as router:
        await router.publish(5)
        a, b = (ScriptedEngine(f"engine-{name}", weight_version=5) for name in "ab")
        await router.join(a, b)
        await router.routable("engine-a", "engine-b")
        await b.stop()
        again = ScriptedEngine("engine-b", weight_version=0)
        again.faults.label_version = 0
        router.engines.remove(b)
        await again.start(b.address)
        await router.join(again)
        await router.wait(lambda: router.reason("engine-b") == "serves no published weight version")
        versions = set()
        for _ in range(10):
            versions |= set((await router.generate(router.request())).versions[0])
        again.set_version(99)
        await router.tell()
        await router.wait(lambda: "99, which the coordinator does not know" in router.reason("engine-b"))
        for _ in range(10):
            versions |= set((await router.generate(router.request())).versions[0])
        assert versions == {5}
        assert again.requests == []
        await router.publish(6)
        again.faults.label_version = -1
        again.set_version(6)
        a.set_version(6)
        await router.tell()
        await router.routable("engine-a", "engine-b")
        for _ in range(4):
            await router.generate(router.request(gate=generation_pb.VersionGate(min_version=6)))
        assert len(again.requests) == len(a.requests) - 20 == 2


async def test_tokens_of_unpublished_weights_are_refused(run_router: Callable[..., Any]) -> None:
    """Case A03: an engine that says READY at 1 and answers with something else is believed once, and harms nothing."""
    async with run_router(probe_every_seconds=0.05) as router:
        first, _ = await _two_engines(router)
        first.faults.label_version = 77
        answers = [await router.generate(router.request()) for _ in range(6)]
        assert all(answer.engines == {"engine-1"} and answer.versions[0] == [1] * 8 for answer in answers)
        assert len(first.requests) <= 1
        assert "never published" in router.reason("engine-0") or "unpublished" in router.reason("engine-0")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_timed_out_caller_frees_the_engine(run_router: Callable[..., Any], stream: bool) -> None:
    """Case A04: the engine learns of the end within a second, runs nothing after, and takes the retry."""
    async with run_router() as router:
        first, second = await _two_engines(router)
        first.tokens.clear()
        second.tokens.clear()
        request = router.request(4, stream=stream)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(request, timeout=0.2)
        assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "4 of 4 samples were unfinished on engine-" in (caught.value.details() or "")
        for engine in (first, second):
            await engine.wait(lambda engine=engine: engine.num_running == 0, seconds=1.0)
        assert len(first.cancelled + second.cancelled) == 1
        first.tokens.set()
        second.tokens.set()
        assert (await router.generate(request)).reasons() == [STOP] * 4


async def test_a_caller_that_goes_away_frees_the_engine_before_its_retry(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        engine = ScriptedEngine("engine-0")
        await router.join(engine)
        await router.routable("engine-0")
        engine.tokens.clear()
        request = router.request(2)
        task = asyncio.create_task(router.generate(request))
        await engine.wait(lambda: engine.num_running == 1)
        task.cancel()
        retry = asyncio.create_task(router.generate(request))
        await engine.wait(lambda: len(engine.requests) == 2)
        assert engine.num_running == 1
        engine.tokens.set()
        assert (await retry).reasons() == [STOP] * 2


async def test_the_same_id_twice_is_refused_while_the_first_runs(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        engine = ScriptedEngine("engine-0")
        await router.join(engine)
        engine.tokens.clear()
        request = router.request()
        task = asyncio.create_task(router.generate(request))
        await engine.wait(lambda: engine.num_running == 1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(request)
        assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
        engine.tokens.set()
        await task


@pytest.mark.parametrize("ignores", [False, True])
async def test_abort_reaches_the_engine_and_ends_every_sample(run_router: Callable[..., Any], ignores: bool) -> None:
    async with run_router() as router:
        await router.publish(1)
        engine = ScriptedEngine("engine-0")
        engine.faults.ignore_abort = ignores
        await router.join(engine)
        engine.tokens.clear()
        request = router.request(3)
        task = asyncio.create_task(router.generate(request))
        await engine.wait(lambda: engine.num_running == 1)
        reached = await router.stub.Abort(pb.AbortRequest(request_ids=[request.input.request_id, "unknown"]), timeout=5)
        assert reached.num_aborted == 1
        assert (await task).reasons() == [ABORT] * 3
        assert request.input.request_id in engine.aborts
        await engine.wait(lambda: engine.num_running == 0, seconds=1.0)


async def test_abort_reaches_a_second_attempt(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        first, second = await _two_engines(router)
        first.faults.die_midstream = 2
        request = router.request(1)
        second.tokens.clear()
        task = asyncio.create_task(router.generate(request))
        await second.wait(lambda: second.num_running == 1)
        await router.stub.Abort(pb.AbortRequest(all=True), timeout=5)
        assert (await task).reasons() == [ABORT]
        assert second.aborts == [f"{request.input.request_id}#2"]


async def test_abort_ends_a_request_that_waits(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        request = router.request(2)
        task = asyncio.create_task(router.generate(request))
        async with asyncio.timeout(10):
            while not router.router.placement.num_waiting:
                await asyncio.wait([task], timeout=0.01)
        await router.stub.Abort(pb.AbortRequest(request_ids=[request.input.request_id]), timeout=5)
        assert (await task).reasons() == [ABORT] * 2
        assert router.router.placement.num_waiting == 0


async def test_the_callers_mistake_is_not_the_engines(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        first, second = await _two_engines(router)
        first.faults.refuse = second.faults.refuse = "sampling.temperature = -1; it must be at least 0"
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router.request())
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert caught.value.details() == first.faults.refuse
        assert len(first.requests + second.requests) == 1
        await router.routable("engine-0", "engine-1")


async def test_a_full_engine_is_passed_over(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        first, _ = await _two_engines(router)
        first.faults.exhausted_seconds = 30.0
        for _ in range(4):
            assert (await router.generate(router.request())).engines == {"engine-1"}
        assert router.reason("engine-0") == ""


async def test_a_full_engine_is_asked_again_after_its_delay(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        await router.publish(1)
        engine = ScriptedEngine("engine-0")
        engine.faults.exhausted_seconds = 0.02
        await router.join(engine)
        task = asyncio.create_task(router.generate(router.request()))
        await engine.wait(lambda: len(engine.requests) >= 3)
        engine.faults.exhausted_seconds = 0.0
        assert (await task).reasons() == [STOP]


async def test_a_hung_engine_is_taken_out_and_its_requests_move(run_router: Callable[..., Any]) -> None:
    async with run_router(probe_every_seconds=0.05, probe_timeout_seconds=0.2) as router:
        first, second = await _two_engines(router)
        first.tokens.clear()
        second.tokens.clear()
        tasks = [asyncio.create_task(router.generate(router.request())) for _ in range(2)]
        await first.wait(lambda: first.num_running == 1)
        await second.wait(lambda: second.num_running == 1)
        first.faults.hang = True
        second.tokens.set()
        assert [(await task).reasons() for task in tasks] == [[STOP]] * 2
        assert router.reason("engine-0").startswith("is unhealthy: probe failed: DEADLINE_EXCEEDED")
        first.faults.hang = False
        await router.routable("engine-0", "engine-1")


async def test_requests_leave_an_engine_whose_lease_ran_out(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        first, second = await _two_engines(router)
        first.tokens.clear()
        request = router.request(2)
        task = asyncio.create_task(router.generate(request))
        await first.wait(lambda: first.num_running == 1)
        await router.tell([second.member()])
        answer = await task
        assert (answer.engines, answer.reasons()) == ({"engine-1"}, [STOP] * 2)
        await first.wait(lambda: first.num_running == 0, seconds=2.0)


async def test_garbled_answers_are_refused(run_router: Callable[..., Any]) -> None:
    async with run_router() as router:
        first, _ = await _two_engines(router)
        first.faults.garble = True
        answer = await router.generate(router.request(2))
        assert answer.engines == {"engine-1"}
        assert answer.reasons() == [STOP] * 2


async def test_retries_end_and_name_the_engine(run_router: Callable[..., Any]) -> None:
    async with run_router(max_retries=1) as router:
        first, second = await _two_engines(router)
        first.faults.garble = second.faults.garble = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await router.generate(router.request())
        assert caught.value.code() == grpc.StatusCode.UNAVAILABLE
        assert "2 engines failed it" in (caught.value.details() or "")
        assert "sampler_logprobs: shape is [7], expected [8]" in (caught.value.details() or "")
