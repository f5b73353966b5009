"""A made-up run that speaks the true wire: coordinator, members, OTLP spans and the ledger, without any model."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import grpc.aio
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, StatusCode, set_span_in_context

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.api.engine.v1 import engine_service_pb2_grpc as engine_grpc
from paceline.rpc.errors import NotFound
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard, timestamp
from paceline.telemetry import names
from paceline.testing.processes import ServiceProcess, service_process

T = TypeVar("T")
RUN = "arithmetic-1"


def write_run_file(folder: Path, **run: object) -> Path:
    """A run file whose run keeps everything in `folder`."""
    path = folder / "run.toml"
    path.write_text(f"""
[run]
name = "{RUN}"
directory = "{folder / "run"}"
steps = {run.get("steps", 100)}
[model]
path = "models/SmolLM2-135M"
[data]
source = {{ name = "jsonl", path = "prompts.jsonl" }}
[rollout]
max_staleness = {run.get("max_staleness", 1)}
[[reward.graders]]
name = "exact_match"
[dashboard]
listen = "{run.get("listen", "127.0.0.1:0")}"
""")
    return path


class FakeCoordinator(pb_grpc.CoordinatorServiceServicer):
    """Holds what a test puts into it, and streams it."""

    def __init__(self, num_steps: int = 100) -> None:
        self.run = pb.Run(run_id=RUN, state=pb.RUN_STATE_ACTIVE, num_steps=num_steps)
        self.run.created_time.CopyFrom(timestamp(time.time() - 754))
        self.records: dict[tuple[int, str, int], pb.StepRecord] = {}
        self.members: dict[str, pb.Member] = {}
        self.version = 0
        self._changed = asyncio.Condition()
        self._sent: list[pb.StepRecord] = []

    async def record(self, record: pb.StepRecord) -> None:
        self.records[(record.kind, record.name, record.step)] = record
        self._sent.append(record)
        self.run.last_step = max(self.run.last_step, record.step if record.kind == pb.RECORD_KIND_TRAIN else 0)
        await self.announce()

    async def finish(self, state: pb.RunState, reason: str) -> None:
        """End the run."""
        self.run.state, self.run.reason = state, reason
        self.run.finished_time.CopyFrom(timestamp(time.time()))
        await self.announce()

    async def announce(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _header(self) -> pb.ResponseHeader:
        return pb.ResponseHeader(run_id=RUN, weight_version=self.version)

    async def GetRun(self, request: pb.GetRunRequest, context: grpc.aio.ServicerContext) -> pb.GetRunResponse:
        if request.run_id != RUN:
            raise NotFound(f"run {request.run_id!r} does not exist")
        return pb.GetRunResponse(header=self._header(), run=self.run)

    async def RegisterMember(self, request: pb.RegisterMemberRequest, context: object) -> pb.RegisterMemberResponse:
        self.members[request.member.member_id] = request.member
        await self.announce()
        return pb.RegisterMemberResponse(header=self._header(), member=request.member)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: object) -> pb.HeartbeatResponse:
        if request.member_id not in self.members:
            raise NotFound("register again")
        self.members[request.member_id].state = request.state
        return pb.HeartbeatResponse(header=self._header(), run_state=self.run.state)

    async def DeregisterMember(
        self, request: pb.DeregisterMemberRequest, context: object
    ) -> pb.DeregisterMemberResponse:
        self.members.pop(request.member_id, None)
        await self.announce()
        return pb.DeregisterMemberResponse(header=self._header())

    async def WatchSteps(self, request: pb.WatchStepsRequest, context: object) -> AsyncIterator[pb.WatchStepsResponse]:
        yield pb.WatchStepsResponse(header=self._header(), run=self.run)
        sent = len(self._sent)
        for key in sorted(self.records):
            if key[2] >= request.start_step:
                yield pb.WatchStepsResponse(header=self._header(), record=self.records[key])
        while True:
            async with self._changed:
                while sent == len(self._sent) and self.run.state == pb.RUN_STATE_ACTIVE:
                    await self._changed.wait()
            for record in self._sent[sent:]:
                yield pb.WatchStepsResponse(header=self._header(), record=record)
            sent = len(self._sent)
            if self.run.state != pb.RUN_STATE_ACTIVE:
                yield pb.WatchStepsResponse(header=self._header(), run=self.run)
                return

    async def WatchMembers(self, request: object, context: object) -> AsyncIterator[pb.WatchMembersResponse]:
        while True:
            yield pb.WatchMembersResponse(header=self._header(), members=self.members.values())
            if self.run.state != pb.RUN_STATE_ACTIVE:
                return
            async with self._changed:
                await self._changed.wait()


class FakeEngine(engine_grpc.EngineServiceServicer):
    """Answers GetLoad with what it is set to."""

    def __init__(self) -> None:
        self.running = 0
        self.waiting = 0
        self.rate = 0.0
        self.version = 1

    async def GetLoad(self, request: object, context: object) -> engine_pb.GetLoadResponse:
        response = engine_pb.GetLoadResponse(weight_version=self.version, state="READY")
        response.ranks.add(
            num_running=self.running, num_waiting=self.waiting, capacity=128, tokens_per_second=self.rate
        )
        return response


@dataclass
class FakeMember:
    """A process with a status board and a server."""

    board: StatusBoard
    server: RpcServer
    engine: FakeEngine | None = None


@dataclass
class FakeRun:
    """The coordinator and the members of a run, on ports of their own."""

    coordinator: FakeCoordinator
    address: str = ""
    members: dict[str, FakeMember] = field(default_factory=dict)
    _server: RpcServer = field(init=False)

    async def add(self, member_id: str, state: str = "READY") -> FakeMember:
        """Start and register a member."""
        service = member_id.rpartition("-")[0]
        board = StatusBoard(service, member_id, f"{member_id}-{time.time()}", RUN, state=state)
        member = FakeMember(board, RpcServer(board), FakeEngine() if service == "engine" else None)
        if member.engine is not None:
            engine_grpc.add_EngineServiceServicer_to_server(member.engine, member.server.server)
        address = member.server.bind("127.0.0.1:0")
        await member.server.start()
        self.members[member_id] = member
        self.coordinator.members[member_id] = pb.Member(
            member_id=member_id, service=service, address=address, incarnation=board.incarnation, state=state
        )
        await self.coordinator.announce()
        return member

    async def add_usual(self, engines: int = 3) -> None:
        """Every service of a run, each with something to say."""
        for name in ("reward-0", "router-0", "rollout-0", "trainer-0"):
            await self.add(name)
        for number in range(engines):
            await self.add(f"engine-{number}")
        self.members["rollout-0"].board.activity("producer").set("generating 12 groups of step 35")
        self.members["router-0"].board.activity("placement").set("relaying 96 requests")
        self.members["reward-0"].board.activity("pool").set("grading")
        wait = self.members["trainer-0"].board.activity("loop")
        wait.waiting_for, wait.since = "8 groups of step 35 (5 are there)", time.time() - 4.2
        await self.coordinator.announce()

    async def start_coordinator(self) -> None:
        """Serve, on the same port as before."""
        self._server = RpcServer(StatusBoard("coordinator", "coordinator-0", str(time.time()), RUN, state="READY"))
        pb_grpc.add_CoordinatorServiceServicer_to_server(self.coordinator, self._server.server)
        self.address = self._server.bind(self.address or "127.0.0.1:0")
        await self._server.start()

    async def stop_coordinator(self) -> None:
        """Go away; what it knows stays."""
        await self._server.stop(0)

    async def vanish(self, member_id: str) -> None:
        """The process dies: its port is closed, its lease runs on."""
        await self.members[member_id].server.stop(0)


def step_record(step: int, seed: int = 0, **values: float) -> pb.StepRecord:
    """A plausible record of training step `step`; `values` replace some of its numbers."""
    noise = random.Random(seed * 100_003 + step)
    learned = 1 - math.exp(-step / 25)
    wait, train = 1.9 + noise.random(), 1.1 + 0.3 * noise.random()
    numbers = {
        names.REWARD_MEAN: 0.08 + 0.72 * learned + noise.gauss(0, 0.03),
        names.REWARD_STD: 0.42 - 0.2 * learned + noise.gauss(0, 0.015),
        names.REWARD_MISSING: 0.0,
        names.LOSS: 0.03 * math.exp(-step / 30) + noise.gauss(0, 0.006),
        names.KL_REFERENCE: 0.02 * learned + abs(noise.gauss(0, 0.002)),
        names.ENTROPY: 1.9 - 1.1 * learned,
        names.CLIP_FRACTION: 0.02,
        names.GRAD_NORM: 0.7 + noise.gauss(0, 0.1),
        names.LEARNING_RATE: 1e-5,
        names.LOGPROB_GAP_MEAN: 0.006 + abs(noise.gauss(0, 0.003)),
        names.LOGPROB_GAP_MAX: 0.2,
        names.SAMPLER_KL: 0.0004 + abs(noise.gauss(0, 0.0003)),
        names.STALENESS_MEAN: 0.6 + 0.3 * noise.random(),
        names.STALENESS_MAX: 1.0,
        names.GROUPS_TRAINED: 8.0,
        names.GROUPS_ZERO_VARIANCE: float(noise.randint(0, 2)),
        names.SAMPLES_TRAINED: 64.0,
        names.TRUNCATED_FRACTION: 0.05,
        names.TOKENS_TRAINED: 3900.0 + noise.randint(-400, 400),
        names.SECONDS_WAIT_GROUPS: wait,
        names.SECONDS_FORWARD_BACKWARD: train,
        names.SECONDS_OPTIMIZER: 0.21,
        names.SECONDS_PUBLISH: 0.34,
        names.SECONDS_CHECKPOINT: 0.18,
        names.SECONDS_STEP: wait + train + 0.21 + 0.34 + 0.18 + 0.05,
        names.TRAIN_TOKENS_PER_SECOND: 3900 / (train + 0.21),
    }
    return pb.StepRecord(
        step=step, kind=pb.RECORD_KIND_TRAIN, values={**numbers, **values}, weight_version=step + 1,
        time=timestamp(time.time()), group_ids=[f"e0.{8 * step + n}" for n in range(8)], trace_id=f"{step:032x}",
    )  # fmt: skip


def evaluation_record(step: int) -> pb.StepRecord:
    """An evaluation after `step`."""
    return pb.StepRecord(
        step=step, kind=pb.RECORD_KIND_EVALUATION, name="held_out", weight_version=step + 1,
        values={names.REWARD_MEAN: 0.1 + 0.6 * (1 - math.exp(-step / 25))}, time=timestamp(time.time()),
    )  # fmt: skip


@asynccontextmanager
async def fake_run(num_steps: int = 100) -> AsyncIterator[FakeRun]:
    """A coordinator that serves, and whatever members are added; all stopped at the end."""
    run = FakeRun(FakeCoordinator(num_steps))
    await run.start_coordinator()
    try:
        yield run
    finally:
        await run.stop_coordinator()
        for member in run.members.values():
            await member.server.stop(0)


class Spans:
    """Sends spans as the services would, with times of our choosing."""

    def __init__(self, endpoint: str) -> None:
        self._providers: dict[str, TracerProvider] = {}
        self._endpoint = endpoint

    def tracer(self, member_id: str):
        """A tracer whose spans come from that member."""
        if member_id not in self._providers:
            about = {"service.name": member_id.rpartition("-")[0], "service.instance.id": member_id}
            provider = TracerProvider(resource=Resource.create(about))
            exporter = OTLPSpanExporter(endpoint=self._endpoint, insecure=True, timeout=5)
            provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=200))
            self._providers[member_id] = provider
        return self._providers[member_id].get_tracer("paceline")

    def span(
        self,
        member: str,
        name: str,
        start: float,
        end: float,
        parent: Span | None = None,
        error: str = "",
        **attributes: object,
    ) -> Span:
        context = set_span_in_context(parent) if parent is not None else None
        named = {f"paceline.{key}": value for key, value in attributes.items()}
        item = self.tracer(member).start_span(name, context=context, attributes=named, start_time=int(start * 1e9))
        if error:
            item.set_status(StatusCode.ERROR, error)
        item.end(end_time=int(end * 1e9))
        return item

    def group(self, group_id: str, start: float, step: int | None = 1, samples: int = 4, failed: bool = False) -> Span:
        """The whole life of a group, from issue to optimizer."""
        noise = random.Random(group_id)
        generate = [1.1 + 1.4 * noise.random() for _ in range(samples)]
        scored = start + 0.05 + max(generate) + 0.02
        end = scored + 0.16
        root = self.span("rollout-0", names.SPAN_ROLLOUT_GROUP, start, end, group_id=group_id, attempt=1 + failed)
        phase = self.span(
            "rollout-0", names.SPAN_ROLLOUT_GENERATE, start + 0.02, scored - 0.01, root, group_id=group_id
        )
        for number, seconds in enumerate(generate):
            engine = f"engine-{number % 3}"
            begun = start + 0.03 + 0.004 * number
            placed = self.span(
                "router-0",
                names.SPAN_ROUTER_GENERATE,
                begun,
                begun + seconds,
                phase,
                engine_id=engine,
                weight_version=step or 1,
            )
            self.span(engine, names.SPAN_ENGINE_QUEUE, begun + 0.01, begun + 0.09, placed)
            self.span(
                engine, names.SPAN_ENGINE_GENERATE, begun + 0.09, begun + seconds - 0.01, placed, engine_id=engine,
                weight_version=step or 1, tokens=int(60 * seconds), cached_tokens=32,
            )  # fmt: skip
        score = self.span("rollout-0", names.SPAN_ROLLOUT_SCORE, scored, scored + 0.11, root, group_id=group_id)
        self.span(
            "reward-0", names.SPAN_REWARD_SCORE, scored + 0.02, scored + 0.1, score, group_id=group_id,
            error="grader took longer than 5.0 s" if failed else "",
        )  # fmt: skip
        self.span("rollout-0", names.SPAN_ROLLOUT_PUT, scored + 0.12, end, root, group_id=group_id)
        if step is not None:
            claimed = end + 0.4 + noise.random()
            self.span("trainer-0", names.SPAN_TRAINER_BUFFER_WAIT, end, claimed, root, group_id=group_id)
            self.span(
                "trainer-0", names.SPAN_TRAINER_TRAIN_GROUP, claimed, claimed + 1.4, root, group_id=group_id, step=step
            )
        return root

    def step(self, step: int, start: float, groups: list[Span]) -> Span:
        """The trace of a step, linked to its groups."""
        links = [Link(group.get_span_context()) for group in groups]
        tracer = self.tracer("trainer-0")
        root = tracer.start_span(
            names.SPAN_TRAINER_STEP, attributes={names.ATTRIBUTE_STEP: step}, links=links, start_time=int(start * 1e9)
        )
        self.span("trainer-0", names.SPAN_TRAINER_CLAIM, start, start + 2, root, step=step)
        self.span("trainer-0", names.SPAN_TRAINER_FORWARD_BACKWARD, start + 2, start + 3.2, root, step=step)
        root.end(end_time=int((start + 4) * 1e9))
        return root

    def flush(self) -> None:
        for provider in self._providers.values():
            provider.force_flush(5000)

    def close(self) -> None:
        for provider in self._providers.values():
            provider.shutdown()


@asynccontextmanager
async def dashboard(run: FakeRun, folder: Path, redis_url: str, **settings: object) -> AsyncIterator[ServiceProcess]:
    """The dashboard process of a fake run, which keeps its store in `folder`."""
    run_file = write_run_file(folder, steps=run.coordinator.run.num_steps, **settings)
    flags = ("--member-id", "dashboard-0")
    async with service_process("dashboard", run_file, *flags, redis_url=redis_url, coordinator=run.address) as (
        process,
        _,
    ):
        yield process


async def until(ask: Callable[[], Awaitable[T | None]], what: str, seconds: float = 20.0) -> T:
    """Ask until the answer is something; fail with `what` when it is not in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        answer = await ask()
        if answer:
            return answer
        await asyncio.sleep(0.1)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


async def get(process: ServiceProcess, path: str) -> Any:
    """What the dashboard's API answers, decoded."""

    def ask() -> Any:
        with urllib.request.urlopen(f"http://{process.labels['http_address']}/api/{path}", timeout=5) as answer:
            return json.load(answer)

    return await asyncio.to_thread(ask)
