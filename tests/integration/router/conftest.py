"""A router in this process, on a real port, over a membership that the test writes; engines are scripted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.router.v1 import router_service_pb2 as pb
from paceline.api.router.v1 import router_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.config.services import RouterConfig
from paceline.ids import new_id
from paceline.rpc.client import open_channel
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard
from paceline.testing.scripted_engine import ScriptedEngine
from services.router.router import Router

RUN = "demo"


@dataclass
class Answer:
    """What came back for one request, sample by sample."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    versions: dict[int, list[int]] = field(default_factory=dict)
    finishes: dict[int, list[generation_pb.GenerationFinish]] = field(default_factory=dict)
    engines: set[str] = field(default_factory=set)

    def add(self, output: generation_pb.GenerationOutput) -> None:
        tokens = arrays.from_wire(output.token_ids, "token_ids").tolist()
        logprobs = arrays.from_wire(output.sampler_logprobs, "sampler_logprobs", length=len(tokens)).tolist()
        self.tokens.setdefault(output.index, []).extend(tokens)
        self.logprobs.setdefault(output.index, []).extend(logprobs)
        self.text[output.index] = self.text.get(output.index, "") + output.text
        versions = [span.weight_version for span in output.version_spans for _ in range(span.num_tokens)]
        self.versions.setdefault(output.index, []).extend(versions)
        if tokens:
            self.engines.add(output.engine_id)
        if output.HasField("finish"):
            self.finishes.setdefault(output.index, []).append(output.finish)

    def reasons(self) -> list[int]:
        """Finish reasons by sample; each must have ended once."""
        assert all(len(items) == 1 for items in self.finishes.values())
        return [self.finishes[index][0].reason for index in sorted(self.finishes)]


class RouterUnderTest:
    """The router, a client of it, and the coordinator's part played by the test."""

    def __init__(self, **options: Any) -> None:
        defaults: dict[str, Any] = {"probe_every_seconds": 60.0, "probe_timeout_seconds": 5.0}
        self.board = StatusBoard("router", "router-0", new_id(), RUN)
        self.published: set[int] = set()
        self.router = Router(RouterConfig(**(defaults | options)), self.board, RUN, self._lookup)
        self.engines: list[ScriptedEngine] = []
        self._members: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._versions: asyncio.Queue[weights_pb2.WeightVersion] = asyncio.Queue()
        self._rpc = RpcServer(self.board)
        self.stub: Any = None
        self.address = ""

    async def _lookup(self, weight_version: int) -> bool:
        return weight_version in self.published

    async def _feed(self, queue: asyncio.Queue[Any]) -> AsyncIterator[Any]:
        while True:
            yield await queue.get()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[RouterUnderTest]:
        pb_grpc.add_RouterServiceServicer_to_server(self.router.server, self._rpc.server)
        self.address = self._rpc.bind("127.0.0.1:0")
        await self._rpc.start()
        task = asyncio.create_task(self.router.run(self._feed(self._members), self._feed(self._versions)))
        channel = open_channel(self.address)
        self.stub = pb_grpc.RouterServiceStub(channel)
        try:
            yield self
        finally:
            await channel.close()
            await self._rpc.server.stop(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.router.table.close()
            for engine in self.engines:
                engine.faults.hang = False
                await engine.stop()

    async def publish(self, weight_version: int) -> None:
        self.published.add(weight_version)
        await self._versions.put(weights_pb2.WeightVersion(weight_version=weight_version))

    async def join(self, *engines: ScriptedEngine) -> None:
        """Start engines and add them to the run."""
        for engine in engines:
            if not engine.address:
                await engine.start()
            self.engines.append(engine)
        await self.tell()

    async def tell(self, members: Sequence[Any] | None = None) -> None:
        """What the coordinator says now; by default that every engine lives."""
        await self._members.put([engine.member() for engine in self.engines] if members is None else list(members))

    async def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until something about the router holds; it is looked at after every change of the table."""
        async with asyncio.timeout(seconds):
            while not condition():
                change = self.router.table.change()
                if condition():
                    return
                await change.wait()

    async def routable(self, *engine_ids: str) -> None:
        """Wait until exactly these engines take requests."""
        table = self.router.table
        await self.wait(lambda: {e.engine_id for e in table.engines if not table.excluded_reason(e)} == set(engine_ids))

    def reason(self, engine_id: str) -> str:
        table = self.router.table
        return next(table.excluded_reason(engine) for engine in table.engines if engine.engine_id == engine_id)

    def request(self, num_samples: int = 1, prompt: Sequence[int] = (1, 2, 3), **fields: Any) -> pb.GenerateRequest:
        sampling = generation_pb.SamplingParams(temperature=1.0, max_new_tokens=fields.pop("max_new_tokens", 64))
        values: dict[str, Any] = {"request_id": new_id(), "run_id": RUN, "seeds": range(10, 10 + num_samples)}
        values |= fields
        prompt_ids = arrays.to_wire(np.array(prompt, np.int32))
        return pb.GenerateRequest(
            input=generation_pb.GenerationInput(prompt_token_ids=prompt_ids, sampling=sampling, **values)
        )

    async def generate(self, request: pb.GenerateRequest, timeout: float = 20.0) -> Answer:
        answer = Answer()
        async for message in self.stub.Generate(request, timeout=timeout):
            answer.add(message.output)
        return answer


@pytest.fixture
def run_router() -> Callable[..., Any]:
    """`async with run_router(policy=...) as router:`"""
    return lambda **options: RouterUnderTest(**options).serve()
