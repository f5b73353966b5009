"""A small world around the real rollout service: router, reward service and coordinator on real sockets, and a trainer
that claims from the real ledger. Each part can be made slow, absent or wrong."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import redis.asyncio
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers

from paceline import arrays
from paceline.api.common.v1 import generation_pb2, reward_pb2
from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.api.reward.v1 import reward_service_pb2 as reward_service
from paceline.api.reward.v1 import reward_service_pb2_grpc as reward_grpc
from paceline.api.router.v1 import router_service_pb2 as router_pb
from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.config import RunFile, parse
from paceline.ledger import Ledger
from paceline.rpc.client import open_channel
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard
from paceline.stream import Claim, SampleStream
from paceline.weights.watch import VersionWatch
from services.rollout.service import Collaborators, Data, RolloutService

WAIT_SECONDS = 20.0


def write_model(folder: Path) -> Path:
    """A model folder with a byte-level tokenizer and nothing else."""
    folder.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = RawTokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    raw.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    raw.save(str(folder / "tokenizer.json"))
    return folder


def run_file(folder: Path, prompts: int = 64, **sections: dict[str, Any]) -> RunFile:
    """A run over `prompts` prompts "p0", "p1", ...; `sections` update the tables."""
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"p{i}", "label": str(i)}) + "\n" for i in range(prompts)))
    raw: dict[str, Any] = {
        "run": {"name": "world", "steps": 4, "seed": 11},
        "model": {"path": str(write_model(folder / "model"))},
        "data": {"source": {"name": "jsonl", "path": str(data)}},
        "rollout": {"groups_per_step": 4, "samples_per_group": 2, "group_deadline_seconds": 20.0, "lease_seconds": 5.0},
        "reward": {"graders": [{"name": "exact_match"}]},
    }
    for name, values in sections.items():
        raw[name] = raw.get(name, {}) | values if isinstance(values, dict) else values
    return parse(raw)


async def until(condition: Callable[[], Any], what: str) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not condition():  # noqa: ASYNC110 - parts of another process, or without an event, are watched
            await asyncio.sleep(0.01)


class FakeRouter(router_grpc.RouterServiceServicer):
    """Samples three tokens a seed, drawn from the seed and the served version alone."""

    def __init__(self) -> None:
        self.served = 1
        self.requests: list[generation_pb2.GenerationInput] = []
        self.hang: set[str] = set()
        """Session ids whose request never ends."""
        self.refuse: dict[str, tuple[grpc.StatusCode, str]] = {}
        self.broken: set[tuple[str, int]] = set()
        """(session id, sibling) whose output does not hold together."""
        self.open = asyncio.Event()
        self.open.set()
        self.engines = True
        self.aborted: list[str] = []
        self.cancelled: list[str] = []
        """Session ids whose caller went away."""

    async def Generate(self, request: router_pb.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        item = request.input
        self.requests.append(item)
        if item.session_id in self.refuse:
            await context.abort(*self.refuse[item.session_id])
        try:
            while item.session_id in self.hang:  # noqa: ASYNC110 - a test takes ids out of the set
                await asyncio.sleep(0.01)
            await self.open.wait()
        except asyncio.CancelledError:
            self.cancelled.append(item.session_id)
            raise
        exact = item.gate.exact_version if item.gate.WhichOneof("gate") == "exact_version" else 0
        if exact and exact != self.served:
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION, f"version {exact} is gone, engines serve {self.served}"
            )
        for index, seed in enumerate(item.seeds):
            yield router_pb.GenerateResponse(output=self._output(item, index, seed))

    def _output(self, item: generation_pb2.GenerationInput, index: int, seed: int) -> generation_pb2.GenerationOutput:
        digest = hashlib.sha256(f"{seed}/{self.served}".encode()).digest()
        tokens = np.frombuffer(digest[:3], np.uint8).astype(np.int32)
        logprobs = np.zeros(2 if (item.session_id, index) in self.broken else 3, np.float32)
        output = generation_pb2.GenerationOutput(
            index=index, token_ids=arrays.to_wire(tokens), sampler_logprobs=arrays.to_wire(logprobs), engine_id="e-0",
            finish=generation_pb2.GenerationFinish(reason=generation_pb2.FINISH_REASON_STOP),
        )  # fmt: skip
        output.version_spans.add(weight_version=self.served, num_tokens=3)
        return output

    async def Abort(self, request: router_pb.AbortRequest, context: Any) -> router_pb.AbortResponse:
        self.aborted += request.request_ids
        return router_pb.AbortResponse(num_aborted=len(request.request_ids))

    async def ListEngines(self, request: Any, context: Any) -> router_pb.ListEnginesResponse:
        reason = "" if self.engines else "no answer to the probe"
        engine = router_pb.EngineEntry(engine_id="e-0", weight_version=self.served, excluded_reason=reason)
        return router_pb.ListEnginesResponse(engines=[engine])


class FakeReward(reward_grpc.RewardServiceServicer):
    """Rewards 0 and 1 in turn; `values` sets those of a group, where None is missing."""

    def __init__(self) -> None:
        self.values: dict[str, list[float | None]] = {}
        self.away = 0
        """How many calls are refused as UNAVAILABLE."""
        self.requests: list[reward_service.ScoreRequest] = []
        self.gone = False

    async def ListGraders(self, request: Any, context: Any) -> reward_service.ListGradersResponse:
        if self.gone:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")
        return reward_service.ListGradersResponse(names=["exact_match"])

    async def Score(self, request: reward_service.ScoreRequest, context: Any) -> reward_service.ScoreResponse:
        self.requests.append(request)
        if self.away > 0 or self.gone:
            self.away -= 1
            await context.abort(grpc.StatusCode.UNAVAILABLE, "graders are starting")
        values = self.values.get(request.group_id, [float(i % 2) for i in range(len(request.items))])
        return reward_service.ScoreResponse(rewards=[_reward(value) for value in values])


def _reward(value: float | None) -> reward_pb2.Reward:
    if value is None:
        return reward_pb2.Reward(missing=reward_pb2.MissingReward(reason=reward_pb2.MISSING_REASON_TIMEOUT))
    return reward_pb2.Reward(value=value)


class FakeCoordinator(coordinator_grpc.CoordinatorServiceServicer):
    """Keeps step records, versions and how the run ended; a member is always welcome."""

    def __init__(self) -> None:
        self.versions = [WeightVersion(weight_version=1, step=0)]
        self.published = asyncio.Condition()
        self.records: list[coordinator_pb.StepRecord] = []
        self.finished: list[coordinator_pb.FinishRunRequest] = []

    async def RecordStep(self, request: coordinator_pb.RecordStepRequest, context: Any) -> Any:
        self.records.append(request.record)
        return coordinator_pb.RecordStepResponse()

    async def FinishRun(self, request: coordinator_pb.FinishRunRequest, context: Any) -> Any:
        self.finished.append(request)
        return coordinator_pb.FinishRunResponse()

    async def RegisterMember(self, request: coordinator_pb.RegisterMemberRequest, context: Any) -> Any:
        return coordinator_pb.RegisterMemberResponse(member=request.member)

    async def Heartbeat(self, request: coordinator_pb.HeartbeatRequest, context: Any) -> Any:
        return coordinator_pb.HeartbeatResponse(run_state=coordinator_pb.RUN_STATE_ACTIVE)

    async def DeregisterMember(self, request: coordinator_pb.DeregisterMemberRequest, context: Any) -> Any:
        return coordinator_pb.DeregisterMemberResponse()

    async def GetVersion(self, request: coordinator_pb.GetVersionRequest, context: Any) -> Any:
        for version in self.versions:
            if version.weight_version == request.weight_version:
                return coordinator_pb.GetVersionResponse(version=version)
        await context.abort(grpc.StatusCode.NOT_FOUND, f"version {request.weight_version} was never published")

    async def WatchVersions(self, request: coordinator_pb.WatchVersionsRequest, context: Any) -> AsyncIterator[Any]:
        sent = request.start_version - 1 if request.start_version else self.versions[-1].weight_version - 1
        while True:
            for version in [item for item in self.versions if item.weight_version > sent]:
                sent = version.weight_version
                yield coordinator_pb.WatchVersionsResponse(version=version)
            async with self.published:
                await self.published.wait_for(lambda: self.versions[-1].weight_version > sent)  # noqa: B023

    async def publish(self, version: WeightVersion) -> None:
        self.versions.append(version)
        async with self.published:
            self.published.notify_all()


@dataclass
class World:
    """The parts, and a trainer that consumes."""

    config: RunFile
    redis: redis.asyncio.Redis
    router: FakeRouter = field(default_factory=FakeRouter)
    reward: FakeReward = field(default_factory=FakeReward)
    coordinator: FakeCoordinator = field(default_factory=FakeCoordinator)
    channels: dict[str, grpc.aio.Channel] = field(default_factory=dict)
    addresses: dict[str, str] = field(default_factory=dict)
    claims: list[Claim] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ledger = Ledger(self.redis, self.config.run.name)
        self.stream = SampleStream(self.redis, self.config.run.name, self.config.rollout.buffer_groups)

    @property
    def version(self) -> WeightVersion:
        """The newest weights."""
        return self.coordinator.versions[-1]

    async def publish(self, step: int) -> None:
        """New weights, served at once."""
        self.router.served = self.version.weight_version + 1
        await self.coordinator.publish(WeightVersion(weight_version=self.router.served, step=step))

    @asynccontextmanager
    async def rollout(self, owner: str = "rollout-0") -> AsyncIterator[RolloutService]:
        """A running rollout service; at the end it is cut off, as if killed: nothing is given back."""
        status = StatusBoard("rollout", owner, "i", self.config.run.name)
        others = Collaborators(
            redis=self.redis,
            router=router_grpc.RouterServiceStub(self.channels["router"]),
            reward=reward_grpc.RewardServiceStub(self.channels["reward"]),
            coordinator=coordinator_grpc.CoordinatorServiceStub(self.channels["coordinator"]),
        )
        service = RolloutService(self.config, owner, Data.load(self.config), others, status)
        service.status = status  # type: ignore[attr-defined]
        watch = VersionWatch(others.coordinator, self.config.run.name, status.activity("versions"))
        task = asyncio.create_task(service.run(watch.follow(0)))
        try:
            yield service
        finally:
            task.cancel()
            (error,) = await asyncio.gather(task, return_exceptions=True)
            assert isinstance(error, asyncio.CancelledError), f"rollout ended by itself: {error!r}"

    async def claim(self, step: int, max_staleness: int | None = 0) -> Claim:
        """What the trainer does before a step: wait for its groups."""
        rollout = self.config.rollout
        async with asyncio.timeout(WAIT_SECONDS):
            token = await self.ledger.wait_change("", 0)
            while True:
                found = await self.stream.claim(
                    "trainer-0", step, rollout.groups_per_step, self.version.weight_version, max_staleness,
                    rollout.too_stale,
                )  # fmt: skip
                if isinstance(found, Claim):
                    self.claims.append(found)
                    return found
                token = await self.ledger.wait_change(token, 1.0)

    async def train(self, steps: range, max_staleness: int | None = 0) -> None:
        """Claim, train and publish, step by step."""
        for step in steps:
            await self.claim(step, max_staleness)
            await self.stream.mark_trained(step)
            await self.publish(step)


@asynccontextmanager
async def open_world(config: RunFile, client: redis.asyncio.Redis) -> AsyncIterator[World]:
    """The world on real sockets. The ledger is created, so that a test can look at it at once."""
    world = World(config, client)
    async with AsyncExitStack() as stack:
        for name, add, servicer in (
            ("router", router_grpc.add_RouterServiceServicer_to_server, world.router),
            ("reward", reward_grpc.add_RewardServiceServicer_to_server, world.reward),
            ("coordinator", coordinator_grpc.add_CoordinatorServiceServicer_to_server, world.coordinator),
        ):
            server = RpcServer(StatusBoard(name, name, "i", config.run.name))
            add(servicer, server.server)
            world.addresses[name] = server.bind("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, 0)
            world.channels[name] = open_channel(world.addresses[name])
            stack.push_async_callback(world.channels[name].close)
        await world.ledger.initialise(len(Data.load(config).dataset), config.data.epochs)
        yield world
