"""An engine without a model: exact tokens by script, faults on demand, a record of what it was asked. Needs no torch.

In a test: `async with ScriptedEngine(script=fixed([5, 6, 7])).serve() as engine: ... engine.address`. As a process:
`python -m paceline.testing.scripted_engine run.toml --member-id engine-0 --coordinator-addr 127.0.0.1:50051`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.api.engine.v1 import engine_service_pb2 as pb
from paceline.api.engine.v1 import engine_service_pb2_grpc as pb_grpc
from paceline.api.weights.v1 import weights_pb2
from paceline.config import load_run_file
from paceline.config.place import Place
from paceline.ids import new_id
from paceline.rpc import errors
from paceline.rpc.announcement import announce
from paceline.rpc.client import open_channel
from paceline.rpc.membership import Membership
from paceline.rpc.parent import die_with_parent
from paceline.rpc.server import RpcServer
from paceline.rpc.status import StatusBoard
from paceline.testing.scripts import Faults, Script, by_prompt, fixed, hashed, scripted_logprob
from paceline.weights.watch import VersionWatch

__all__ = ["Faults", "Script", "ScriptedEngine", "by_prompt", "fixed", "hashed", "scripted_logprob"]


@dataclass
class Running:
    """One request under way."""

    request: generation_pb.GenerationInput
    aborted: asyncio.Event = field(default_factory=asyncio.Event)


class ScriptedEngine(pb_grpc.EngineServiceServicer):
    """EngineService by script. `requests`, `aborts` and `cancelled` say what happened; `tokens` holds generation back.

    `tokens` is an event: while it is clear no token is produced, so a test stops the world at an exact place.
    """

    def __init__(
        self, engine_id: str = "engine-0", script: Script | None = None, weight_version: int = 1, state: str = "READY",
        token_seconds: float = 0.0, dp_size: int = 1, run_id: str = "",
    ) -> None:  # fmt: skip
        self.script = script or hashed()
        self.token_seconds = token_seconds
        """Pause before each token."""
        self.faults = Faults()
        self.requests: list[generation_pb.GenerationInput] = []
        self.aborts: list[str] = []
        """Ids that Abort named."""
        self.cancelled: list[str] = []
        """Ids whose call was cancelled, by the caller or its deadline."""
        self.num_probes = 0
        self.num_tokens = 0
        self.tokens = asyncio.Event()
        self.tokens.set()
        self.changed = asyncio.Condition()
        self.board = StatusBoard("engine", engine_id, new_id(), run_id, state=state, weight_version=weight_version)
        self.labels = {"dp_size": str(dp_size)}
        self.address = ""
        self.membership: Membership | None = None
        self.exit_on_death = False
        """Die by ending the process, where the engine is one."""
        self.text_of: Callable[[int], str] = lambda token: f"{token} "
        """Text of a token."""
        self._running: dict[str, Running] = {}
        self._server: RpcServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def engine_id(self) -> str:
        """Its member id."""
        return self.board.member_id

    @property
    def num_running(self) -> int:
        """Requests under way."""
        return len(self._running)

    def member(self) -> coordinator_pb.Member:
        """What the coordinator would say of it."""
        return coordinator_pb.Member(
            member_id=self.engine_id, service="engine", address=self.address, incarnation=self.board.incarnation,
            state=self.board.state, weight_version=self.board.weight_version, labels=self.labels,
        )  # fmt: skip

    def set_version(self, weight_version: int, state: str = "READY") -> None:
        """Serve these weights from now on, and say so."""
        self.board.weight_version, self.board.state = weight_version, state
        if self.membership is not None:
            self.membership.report_now()

    async def wait(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until something about this engine holds; TimeoutError after `seconds`."""
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(condition)

    async def start(self, listen: str = "127.0.0.1:0") -> str:
        """Serve and return the address; `listen` may be an earlier address, to come back there."""
        self._server = RpcServer(self.board)
        pb_grpc.add_EngineServiceServicer_to_server(self, self._server.server)
        self.address = self._server.bind(listen)
        await self._server.start()
        await self._server.set_serving(True)
        return self.address

    async def stop(self, grace: float = 0.0) -> None:
        """Stop serving; with grace 0 running calls break off, as they do when a process dies."""
        server, self._server = self._server, None
        if server is not None:
            await server.server.stop(grace)

    @asynccontextmanager
    async def serve(self, listen: str = "127.0.0.1:0") -> AsyncIterator[ScriptedEngine]:
        """Serve during a block."""
        await self.start(listen)
        try:
            yield self
        finally:
            await self.stop()

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        asked = request.input
        self.requests.append(asked)
        await self._notify()
        await self._refuse_or_hang()
        if asked.request_id in self._running:
            raise errors.AlreadyExists(f"request {asked.request_id!r} is running on {self.engine_id}")
        self._check_gate(asked)
        running = self._running[asked.request_id] = Running(asked)
        finished = False
        try:
            async for output in self._outputs(running):
                yield pb.GenerateResponse(output=output)
            finished = True
        finally:
            self._running.pop(asked.request_id, None)
            if not finished:
                self.cancelled.append(asked.request_id)
            # In a task of its own: a cancelled call cannot wait.
            self._spawn(self._notify())

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        self.aborts.extend(request.request_ids)
        count = 0
        for request_id in list(self._running) if request.all else request.request_ids:
            running = self._running.get(request_id)
            if running is not None and not self.faults.ignore_abort:
                running.aborted.set()
                count += len(running.request.seeds)
        await self._notify()
        return pb.AbortResponse(num_aborted=count)

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseResponse:
        self.tokens.clear()
        return pb.PauseResponse(num_running=self.num_running)

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.ResumeResponse:
        self.tokens.set()
        return pb.ResumeResponse()

    async def Probe(self, request: pb.ProbeRequest, context: grpc.aio.ServicerContext) -> pb.ProbeResponse:
        self.num_probes += 1
        await self._notify()
        await self._refuse_or_hang(probe=True)
        return pb.ProbeResponse(weight_version=self.label)

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        response = pb.GetLoadResponse(weight_version=self.board.weight_version, state=self.board.state)
        response.ranks.add(num_running=self.num_running, capacity=1024)
        return response

    async def _refuse_or_hang(self, probe: bool = False) -> None:
        faults = self.faults
        if faults.hang:
            await asyncio.Event().wait()
        if faults.unavailable:
            raise errors.Unavailable(f"{self.engine_id} is told to be unavailable")
        if self.label == 0 and faults.label_version < 0:
            raise errors.Unavailable(f"{self.engine_id} has no published weight version yet")
        if probe:
            return
        if faults.refuse:
            raise errors.InvalidArgument(faults.refuse)
        if faults.exhausted_seconds:
            raise errors.ResourceExhausted(f"queue of {self.engine_id} is full", faults.exhausted_seconds)

    def _check_gate(self, asked: generation_pb.GenerationInput) -> None:
        held, kind = self.board.weight_version, asked.gate.WhichOneof("gate")
        wanted = getattr(asked.gate, kind) if kind else 0
        if self.faults.label_version >= 0 or kind is None:
            return
        if held < wanted:
            raise errors.FailedPrecondition(f"{self.engine_id} serves weight version {held}, not yet {wanted}")
        if kind == "exact_version" and held > wanted:
            raise errors.Aborted(f"{self.engine_id} has left weight version {wanted} for {held}")

    @property
    def label(self) -> int:
        """The version that tokens are labelled with."""
        return self.faults.label_version if self.faults.label_version >= 0 else self.board.weight_version

    async def _outputs(self, running: Running) -> AsyncIterator[generation_pb.GenerationOutput]:
        """Tokens of all samples in turn, as a batch would produce them."""
        asked = running.request
        prompt = arrays.from_wire(asked.prompt_token_ids, "prompt_token_ids", "int32").tolist()
        samples = []
        for index, seed in enumerate(asked.seeds):
            plan = list(self.script(prompt, seed, self.board.weight_version))[: asked.sampling.max_new_tokens]
            samples.append(_Sample(index, plan, asked, len(prompt), self))
        while going := [sample for sample in samples if not sample.finished]:
            if not await self._next_token(running):
                for sample in going:
                    yield sample.flush(generation_pb.FINISH_REASON_ABORT)
                return
            for sample in going:
                await self._die_if_told()
                self.num_tokens += 1
                reason = sample.step(self.label)
                if reason or asked.stream:
                    yield sample.flush(reason, garble=self.faults.garble)
            await self._notify()

    async def _next_token(self, running: Running) -> bool:
        """Wait until a token may be produced; False when the request was aborted."""
        if self.token_seconds:
            await _first_of(running.aborted, None, self.token_seconds)
        if not self.tokens.is_set():
            await _first_of(running.aborted, self.tokens, None)
        await asyncio.sleep(0)
        return not running.aborted.is_set()

    async def _die_if_told(self) -> None:
        if not self.faults.die_midstream or self.num_tokens < self.faults.die_midstream:
            return
        if self.exit_on_death:
            os._exit(9)
        self._spawn(self.stop())
        await asyncio.Event().wait()

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _Sample:
    """One sample under way: its plan, and the tokens that were not sent yet."""

    def __init__(
        self, index: int, plan: list[int], asked: generation_pb.GenerationInput, num_prompt_tokens: int,
        engine: ScriptedEngine,
    ) -> None:  # fmt: skip
        self._index = index
        self._plan = plan
        self._asked = asked
        self._num_prompt_tokens = num_prompt_tokens
        self._engine = engine
        self._unsent: list[tuple[int, int]] = []
        self._position = 0
        self.finished = False

    def step(self, label: int) -> generation_pb.FinishReason.ValueType:
        """Produce the next token; the finish reason when it was the last, else UNSPECIFIED."""
        if self._position < len(self._plan):
            self._unsent.append((self._plan[self._position], label))
            self._position += 1
        if self._position < len(self._plan):
            return generation_pb.FINISH_REASON_UNSPECIFIED
        at_limit = len(self._plan) >= self._asked.sampling.max_new_tokens
        return generation_pb.FINISH_REASON_LENGTH if at_limit else generation_pb.FINISH_REASON_STOP

    def flush(
        self, reason: generation_pb.FinishReason.ValueType, garble: bool = False
    ) -> generation_pb.GenerationOutput:
        """A message with the tokens that were not sent yet."""
        tokens = np.array([token for token, _ in self._unsent], np.int32)
        logprobs = np.array([scripted_logprob(token) for token in tokens.tolist()], np.float32)
        output = generation_pb.GenerationOutput(
            index=self._index, token_ids=arrays.to_wire(tokens), engine_id=self._engine.engine_id,
            sampler_logprobs=arrays.to_wire(logprobs[1:] if garble else logprobs),
            text="".join(self._engine.text_of(token) for token in tokens.tolist()),
        )  # fmt: skip
        for label, run in itertools.groupby(label for _, label in self._unsent):
            output.version_spans.add(weight_version=label, num_tokens=len(list(run)))
        if top := self._asked.num_top_logprobs:
            ids = tokens[:, None] + np.arange(top, dtype=np.int32)
            output.top_token_ids.CopyFrom(arrays.to_wire(ids.astype(np.int32)))
            output.top_logprobs.CopyFrom(arrays.to_wire(logprobs[:, None] - np.arange(top, dtype=np.float32)))
        if reason:
            self.finished = True
            finish = output.finish
            finish.reason, finish.num_prompt_tokens = reason, self._num_prompt_tokens
            finish.num_generated_tokens = self._position
        self._unsent = []
        return output


async def _first_of(first: asyncio.Event, second: asyncio.Event | None, seconds: float | None) -> None:
    """Return when one of the events is set, or after `seconds`."""
    waits = [asyncio.ensure_future(event.wait()) for event in (first, second) if event is not None]
    try:
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def run_process(engine: ScriptedEngine, place: Place, follow: bool) -> None:
    """Serve as a member of a run until SIGTERM. With `follow` the engine takes every published version at once."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await engine.start(place.listen)
    channel = open_channel(place.address_of("coordinator"))
    stub = coordinator_grpc.CoordinatorServiceStub(channel)
    engine.membership = Membership(stub, engine.board, engine.address, engine.labels)
    if place.ready_fd is not None:
        announce(place.ready_fd, engine.address, {})
    work = [engine.membership.run(), stop.wait()] + ([follow_versions(engine, stub)] if follow else [])
    tasks = [asyncio.ensure_future(item) for item in work]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    await engine.membership.leave()
    await engine.stop(1.0)
    await channel.close()
    for task in done:
        task.result()


async def follow_versions(engine: ScriptedEngine, stub: Any) -> None:
    """Take every published version, and acknowledge it with the digest that was published."""
    watch = VersionWatch(stub, engine.board.run_id, engine.board.activity("versions"))
    async for version in watch.follow(0):
        weights = weights_pb2.EngineWeights(
            engine_id=engine.engine_id, weight_version=version.weight_version, digest=version.digest, applied=True
        )
        request = coordinator_pb.ReportWeightsRequest(
            request_id=new_id(), run_id=engine.board.run_id, weights=weights
        )  # fmt: skip
        await stub.ReportWeights(request, timeout=5.0)
        engine.set_version(version.weight_version)


def main() -> None:
    """Takes the command line of `services.engine`, so that it can stand in for one, and some flags of its own."""
    parser = argparse.ArgumentParser(prog="python -m paceline.testing.scripted_engine", description=__doc__)
    parser.add_argument("run_file", nargs="?", type=Path, help="run file, for the run id")
    parser.add_argument("overrides", nargs="*", help="key=value")
    parser.add_argument("--run-id", default="", help="run id, where there is no run file")
    parser.add_argument("--weight-version", type=int, default=0, help="version to claim from the start")
    parser.add_argument("--state", default="READY", help="state to claim from the start")
    parser.add_argument("--no-follow", action="store_true", help="stay at --weight-version whatever is published")
    parser.add_argument("--length", type=int, default=8, help="tokens of each sample")
    parser.add_argument("--vocabulary", type=int, default=100, help="token ids are below this")
    parser.add_argument("--token-seconds", type=float, default=0.0, help="pause before each token")
    parser.add_argument("--fault", action="append", default=[], help="name=value, as in hang=1; repeatable")
    Place.add_arguments(parser)
    arguments = parser.parse_args()
    if not arguments.run_id and arguments.run_file is None:
        parser.error("name the run: a run file, or --run-id")
    place = Place.from_arguments(arguments)
    if place.parent_pid is not None:
        die_with_parent(place.parent_pid)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    run_id = arguments.run_id or load_run_file(arguments.run_file, arguments.overrides).run.name
    asyncio.run(_serve(arguments, place, run_id))


async def _serve(arguments: argparse.Namespace, place: Place, run_id: str) -> None:
    script = hashed(arguments.length, arguments.vocabulary)
    engine = ScriptedEngine(
        place.member_id or "engine-0", script, arguments.weight_version, arguments.state, arguments.token_seconds,
        run_id=run_id,
    )  # fmt: skip
    engine.exit_on_death = True
    for fault in arguments.fault:
        engine.faults.set(fault)
    await run_process(engine, place, follow=not arguments.no_follow)


if __name__ == "__main__":
    main()
