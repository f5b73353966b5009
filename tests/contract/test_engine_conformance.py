"""What every engine backend must do, asked over gRPC. A new backend is tested by one line in BACKENDS."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from paceline import arrays
from paceline.api.common.v1 import generation_pb2
from paceline.api.engine.v1 import engine_service_pb2 as pb
from paceline.api.engine.v1 import engine_service_pb2_grpc as pb_grpc
from paceline.config.services import EngineConfig
from paceline.plugins import registry
from paceline.rpc import errors
from paceline.rpc.client import open_channel
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard
from paceline.telemetry import tracing
from paceline.weights.manifest import Manifest
from services.engine.server import EngineServer

MODEL = Path(__file__).parents[1] / "assets" / "sort4"
MAX_LENGTH = 256


def embedded(config: EngineConfig) -> Any:
    plugin = registry("engine_backend").load("embedded")
    return plugin(plugin.Options(), config, str(MODEL))


BACKENDS: dict[str, Callable[[EngineConfig], Any]] = {"embedded": embedded}
SMALL = EngineConfig(max_sequences=8, max_sequence_length=MAX_LENGTH, max_waiting=3)


@dataclass
class Served:
    """A backend behind a real gRPC server."""

    stub: Any
    backend: Any
    board: StatusBoard
    publish: Callable[[int], Path]

    async def apply(self, version: int) -> None:
        await self.backend.apply(self.publish(version), version, "in_place")


@dataclass
class Sample:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    text: str = ""
    messages: int = 0
    finish: generation_pb2.GenerationFinish | None = None


@pytest.fixture(params=sorted(BACKENDS))
async def served(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Served]:
    backend = BACKENDS[request.param](SMALL)
    board = StatusBoard("engine", "engine-0", "one", "run")
    server = RpcServer(board)
    address = server.bind("127.0.0.1:0")
    pb_grpc.add_EngineServiceServicer_to_server(EngineServer(backend, board, MAX_LENGTH), server.server)
    await server.start()

    def publish(version: int) -> Path:
        folder = tmp_path / f"v{version}"
        folder.mkdir()
        shutil.copy(MODEL / "model.safetensors", folder)
        Manifest.describe(folder, version, version - 1, "full").write(folder)
        return folder

    await backend.load()
    board.state = "SYNCING"
    async with open_channel(address) as channel:
        yield Served(pb_grpc.EngineServiceStub(channel), backend, board, publish)
    await backend.close()
    await server.stop(1)


@pytest.fixture
async def ready(served: Served) -> Served:
    await served.apply(1)
    served.board.state = "READY"
    return served


def asks(
    request_id: str = "r", samples: int = 1, prompt: tuple[int, ...] = (5, 6, 7, 8, 42), **options
) -> pb.GenerateRequest:
    sampling = {"temperature": 1.0, "max_new_tokens": 8, "ignore_eos": True} | options.pop("sampling", {})
    message = generation_pb2.GenerationInput(
        request_id=request_id, run_id="run", prompt_token_ids=arrays.to_wire(np.asarray(prompt, np.int32)),
        sampling=generation_pb2.SamplingParams(**sampling), seeds=range(100, 100 + samples), **options,
    )  # fmt: skip
    return pb.GenerateRequest(input=message)


def long(request_id: str, samples: int = 1, **options) -> pb.GenerateRequest:
    return asks(request_id, samples, stream=True, sampling={"max_new_tokens": 240}, **options)


async def collect(call: Any, samples: int = 1) -> list[Sample]:
    found = [Sample() for _ in range(samples)]
    async for response in call:
        output = response.output
        sample = found[output.index]
        assert sample.finish is None, "nothing may follow the finish of a sample"
        count = len(arrays.from_wire(output.token_ids, "token_ids", "int32"))
        sample.tokens += arrays.from_wire(output.token_ids, "token_ids", "int32").tolist()
        sample.logprobs += arrays.from_wire(output.sampler_logprobs, "logprobs", "float32", count).tolist()
        sample.spans += [(span.weight_version, span.num_tokens) for span in output.version_spans]
        assert sum(span.num_tokens for span in output.version_spans) == count
        assert output.engine_id == "engine-0"
        sample.text += output.text
        sample.messages += 1
        if output.HasField("finish"):
            sample.finish = output.finish
    return found


async def refused(call: Any) -> errors.PacelineError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await collect(call, 16)
    return errors.from_rpc(caught.value)


async def running(call: Any) -> None:
    """Wait for the first tokens of a streaming call."""
    async with asyncio.timeout(30):
        await anext(aiter(call))


async def drained(served: Served) -> None:
    """Wait until the engine does nothing."""
    async with asyncio.timeout(30):
        while True:
            response = await served.stub.GetLoad(pb.GetLoadRequest(), timeout=10)
            if not any(rank.num_running + rank.num_waiting for rank in response.ranks):
                return


async def test_every_sample_is_whole_and_says_where_it_comes_from(ready: Served):
    found = await collect(ready.stub.Generate(asks(samples=5), timeout=30), 5)
    for sample in found:
        assert sample.finish is not None
        assert len(sample.tokens) == len(sample.logprobs) == 8 == sample.finish.num_generated_tokens
        assert sample.finish.reason == generation_pb2.FINISH_REASON_LENGTH
        assert sample.finish.num_prompt_tokens == 5
        assert sample.spans == [(1, 8)]
        assert all(value <= 0 for value in sample.logprobs)
        assert sample.messages == 1
    assert sum(item.finish.num_cached_tokens for item in found if item.finish) == 4 * 5


async def test_streaming_gives_the_same_tokens_in_pieces(ready: Served):
    [whole] = await collect(ready.stub.Generate(asks("a"), timeout=30))
    [pieces] = await collect(ready.stub.Generate(asks("b", stream=True), timeout=30))
    assert (whole.tokens, whole.logprobs, whole.text) == (pieces.tokens, pieces.logprobs, pieces.text)
    assert pieces.messages > 1


async def test_a_sample_depends_on_its_seed_alone_whatever_else_runs(ready: Served):
    every = await collect(ready.stub.Generate(asks("all", 6), timeout=30), 6)
    other = ready.stub.Generate(long("noise", 3, prompt=(9, 9, 9)), timeout=60)
    await running(other)
    again = await collect(ready.stub.Generate(asks("again", 4), timeout=30), 4)
    other.cancel()
    assert [item.tokens for item in again] == [item.tokens for item in every[:4]]
    assert [item.logprobs for item in again] == [item.logprobs for item in every[:4]]


async def test_greedy_is_the_same_for_every_seed(ready: Served):
    found = await collect(ready.stub.Generate(asks(samples=3, sampling={"temperature": 0.0}), timeout=30), 3)
    assert found[0].tokens == found[1].tokens == found[2].tokens


async def test_stop_ids_and_stop_strings_end_a_sample_with_the_match_kept(ready: Served):
    [free] = await collect(ready.stub.Generate(asks("a"), timeout=30))
    wanted = free.tokens[3]
    first = free.tokens.index(wanted) + 1
    [by_id] = await collect(ready.stub.Generate(asks("b", sampling={"stop_token_ids": [wanted]}), timeout=30))
    assert (by_id.tokens, by_id.finish and by_id.finish.reason) == (
        free.tokens[:first],
        generation_pb2.FINISH_REASON_STOP,
    )
    assert by_id.finish is not None
    assert by_id.finish.matched_stop == str(wanted)
    stop = free.text[1:4]
    [by_text] = await collect(ready.stub.Generate(asks("c", sampling={"stop": [stop]}), timeout=30))
    assert by_text.text.endswith(stop)
    assert by_text.tokens == free.tokens[: len(by_text.tokens)]
    assert by_text.finish is not None
    assert by_text.finish.matched_stop == stop


async def test_the_end_of_sequence_ends_a_sample_unless_ignored(ready: Served):
    found = await collect(
        ready.stub.Generate(asks(samples=8, sampling={"ignore_eos": False, "max_new_tokens": 60}), timeout=30), 8
    )
    ended = [item for item in found if item.finish and item.finish.reason == generation_pb2.FINISH_REASON_STOP]
    assert ended
    assert all(item.tokens[-1] == 0 and 0 not in item.tokens[:-1] for item in ended)


async def test_top_logprobs_have_the_shape_that_was_asked(ready: Served):
    async for response in ready.stub.Generate(asks(num_top_logprobs=3), timeout=30):
        output = response.output
        assert list(output.top_token_ids.shape) == list(output.top_logprobs.shape) == [8, 3]
        top = arrays.from_wire(output.top_logprobs, "top_logprobs", "float32")
        assert (np.diff(top, axis=1) <= 0).all()


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (asks(sampling={"max_new_tokens": 253}), ("5 tokens", "253", str(MAX_LENGTH))),
        (asks(sampling={"max_new_tokens": 0}), ("max_new_tokens", "0")),
        (asks(sampling={"temperature": -1.0}), ("temperature", "-1")),
        (asks(sampling={"temperature": float("nan")}), ("temperature", "nan")),
        (asks(sampling={"top_p": 1.5}), ("top_p", "1.5")),
        (asks(sampling={"top_k": -2}), ("top_k", "-2")),
        (asks(sampling={"stop": [""]}), ("stop",)),
        (asks(prompt=(1, 51)), ("prompt_token_ids", "51", "50")),
        (asks(prompt=()), ("prompt_token_ids",)),
        (asks(samples=0), ("seeds", "0")),
        (asks(""), ("request_id",)),
        (asks(num_top_logprobs=1000), ("num_top_logprobs", "1000")),
    ],
)
async def test_a_wrong_request_is_refused_with_field_and_value(ready: Served, request_: pb.GenerateRequest, words):
    error = await refused(ready.stub.Generate(request_, timeout=30))
    assert isinstance(error, errors.InvalidArgument)
    assert all(word in error.message for word in words), error.message


async def test_a_request_of_another_run_is_refused(ready: Served):
    request = asks()
    request.input.run_id = "other"
    error = await refused(ready.stub.Generate(request, timeout=30))
    assert isinstance(error, errors.InvalidArgument)
    assert "other" in error.message


async def test_nothing_is_generated_before_the_first_version(served: Served):
    call = served.stub.Generate(asks(), timeout=0.5)
    error = await refused(call)
    assert isinstance(error, errors.Unavailable | errors.DeadlineExceeded)


async def test_a_running_request_id_is_taken_and_free_again_afterwards(ready: Served):
    first = ready.stub.Generate(long("same"), timeout=60)
    await running(first)
    error = await refused(ready.stub.Generate(asks("same"), timeout=30))
    assert isinstance(error, errors.AlreadyExists)
    first.cancel()
    await drained(ready)
    [after] = await collect(ready.stub.Generate(asks("same"), timeout=30))
    assert len(after.tokens) == 8


async def test_a_full_queue_refuses_with_a_retry_delay(ready: Served):
    calls = [ready.stub.Generate(long("run", 8), timeout=60)]
    await running(calls[0])
    waiting = [ready.stub.Generate(asks(f"w{n}"), timeout=60) for n in range(3)]
    tasks = [asyncio.create_task(collect(call)) for call in waiting]
    async with asyncio.timeout(30):
        while (await ready.stub.GetLoad(pb.GetLoadRequest(), timeout=10)).ranks[0].num_waiting < 3:
            pass
    error = await refused(ready.stub.Generate(asks("over"), timeout=30))
    assert isinstance(error, errors.ResourceExhausted)
    assert error.retry_delay is not None
    assert error.retry_delay > 0
    calls[0].cancel()
    for [sample] in await asyncio.gather(*tasks):
        assert len(sample.tokens) == 8


async def test_cancelling_the_call_frees_its_slots(ready: Served):
    call = ready.stub.Generate(long("gone", 8), timeout=60)
    await running(call)
    call.cancel()
    [after] = await collect(ready.stub.Generate(asks("after"), timeout=30))
    assert len(after.tokens) == 8
    await drained(ready)


async def test_abort_ends_each_sample_with_what_it_has(ready: Served):
    call = ready.stub.Generate(long("a", 4), timeout=60)
    task = asyncio.create_task(collect(call, 4))
    async with asyncio.timeout(30):
        while (await ready.stub.GetLoad(pb.GetLoadRequest(), timeout=10)).ranks[0].num_running < 4:
            pass
    response = await ready.stub.Abort(pb.AbortRequest(request_ids=["a", "unknown"]), timeout=10)
    assert response.num_aborted == 4
    for sample in await task:
        assert sample.finish is not None
        assert sample.finish.reason == generation_pb2.FINISH_REASON_ABORT
        assert len(sample.tokens) == sample.finish.num_generated_tokens < 240
    assert (await ready.stub.Abort(pb.AbortRequest(all=True), timeout=10)).num_aborted == 0


@pytest.mark.parametrize("gate", ["exact_version", "min_version"])
async def test_a_version_that_is_not_held_yet_is_a_failed_precondition(ready: Served, gate: str):
    request = asks(gate=generation_pb2.VersionGate(**{gate: 2}))
    error = await refused(ready.stub.Generate(request, timeout=30))
    assert isinstance(error, errors.FailedPrecondition)
    assert "2" in error.message


async def test_an_exact_version_that_was_left_is_aborted_and_a_minimum_is_met(ready: Served):
    await ready.apply(2)
    error = await refused(ready.stub.Generate(asks("a", gate=generation_pb2.VersionGate(exact_version=1)), timeout=30))
    assert isinstance(error, errors.Aborted)
    [met] = await collect(ready.stub.Generate(asks("b", gate=generation_pb2.VersionGate(min_version=1)), timeout=30))
    assert met.spans == [(2, 8)]


async def test_an_update_in_the_middle_of_a_sample_shows_in_its_spans(ready: Served):
    call = ready.stub.Generate(long("a"), timeout=60)
    await running(call)
    await ready.apply(2)
    [rest] = await collect(call)
    versions = [version for version, _ in rest.spans]
    assert versions == sorted(versions)
    assert versions[-1] == 2


@pytest.mark.parametrize("mode", [pb.PAUSE_MODE_IN_PLACE, pb.PAUSE_MODE_RETRACT])
async def test_a_pause_holds_generation_and_the_tokens_are_the_same_after_it(ready: Served, mode):
    [free] = await collect(ready.stub.Generate(long("free"), timeout=60))
    call = ready.stub.Generate(long("held"), timeout=60)
    task = asyncio.create_task(collect(call))
    async with asyncio.timeout(30):
        while (await ready.stub.GetLoad(pb.GetLoadRequest(), timeout=10)).ranks[0].num_running < 1:
            pass
    response = await ready.stub.Pause(pb.PauseRequest(request_id="p", mode=mode, deadline_seconds=60), timeout=10)
    assert response.num_running == 1
    late = asyncio.create_task(collect(ready.stub.Generate(asks("late"), timeout=60)))
    assert (await ready.stub.Probe(pb.ProbeRequest(), timeout=10)).weight_version == 1
    assert not task.done()
    assert not late.done()
    await ready.stub.Resume(pb.ResumeRequest(request_id="p"), timeout=10)
    [held] = await task
    await late
    assert len(held.tokens) == len(free.tokens)
    if mode == pb.PAUSE_MODE_IN_PLACE:
        assert (held.tokens, held.logprobs) == (free.tokens, free.logprobs)


async def test_a_pause_ends_by_its_deadline(ready: Served):
    await ready.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_IN_PLACE, deadline_seconds=0.2), timeout=10)
    [sample] = await collect(ready.stub.Generate(asks(), timeout=30))
    assert len(sample.tokens) == 8


async def test_pausing_by_drain_lets_the_running_ones_finish(ready: Served):
    call = ready.stub.Generate(long("a"), timeout=60)
    await running(call)
    task = asyncio.create_task(collect(call))
    await ready.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_DRAIN, deadline_seconds=60), timeout=60)
    [sample] = await task
    assert sample.finish is not None
    assert sample.finish.num_generated_tokens == 240
    late = asyncio.create_task(collect(ready.stub.Generate(asks("late"), timeout=60)))
    await ready.stub.Probe(pb.ProbeRequest(), timeout=10)
    assert not late.done()
    await ready.stub.Resume(pb.ResumeRequest(), timeout=10)
    assert len((await late)[0].tokens) == 8


async def test_pausing_by_abort_ends_the_running_ones(ready: Served):
    call = ready.stub.Generate(long("a"), timeout=60)
    await running(call)
    await ready.stub.Pause(pb.PauseRequest(mode=pb.PAUSE_MODE_ABORT, deadline_seconds=60), timeout=10)
    [sample] = await collect(call)
    assert sample.finish is not None
    assert sample.finish.reason == generation_pb2.FINISH_REASON_ABORT
    await ready.stub.Resume(pb.ResumeRequest(), timeout=10)


@pytest.mark.parametrize(
    "request_", [pb.PauseRequest(deadline_seconds=1), pb.PauseRequest(mode=1, deadline_seconds=601)]
)
async def test_a_wrong_pause_is_refused(ready: Served, request_: pb.PauseRequest):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ready.stub.Pause(request_, timeout=10)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_the_probe_and_the_load_answer_while_the_engine_is_full(ready: Served):
    call = ready.stub.Generate(long("a", 8), timeout=60)
    await running(call)
    probe = await ready.stub.Probe(pb.ProbeRequest(), timeout=10)
    assert probe.weight_version == 1
    load = await ready.stub.GetLoad(pb.GetLoadRequest(), timeout=10)
    assert (load.weight_version, load.state) == (1, "READY")
    assert load.ranks[0].num_running == load.ranks[0].capacity == 8
    assert load.ranks[0].tokens_per_second > 0
    call.cancel()


async def test_a_request_leaves_two_spans_in_its_trace(ready: Served):
    exporter = InMemorySpanExporter()
    tracing.add_processor(SimpleSpanProcessor(exporter))
    await collect(ready.stub.Generate(asks("traced", 3), timeout=30), 3)
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert spans["engine.queue"].end_time <= spans["engine.generate"].end_time
    attributes = spans["engine.generate"].attributes
    assert attributes["paceline.tokens"] == 24
    assert attributes["paceline.weight_version"] == 1
    assert attributes["paceline.engine_id"] == "engine-0"
    assert attributes["paceline.cached_tokens"] == 10
