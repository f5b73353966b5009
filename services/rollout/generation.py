"""One request to the router and the sequences that come back, checked and joined."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import grpc.aio
import numpy as np

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as pb
from paceline.api.router.v1 import router_service_pb2 as router_pb
from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.config.data import SamplingConfig
from paceline.generation import MalformedOutput, join_spans, read_output
from paceline.rpc import errors
from paceline.weights.gate import admits

ABORT_SECONDS = 5.0


@dataclass
class Sequence:
    """What was sampled under one seed."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(weight_version, num_tokens), neighbours of one version merged."""
    reason: pb.FinishReason.ValueType = pb.FINISH_REASON_UNSPECIFIED
    """Why it ended; UNSPECIFIED while it has not."""
    engine_id: str = ""
    num_cached_tokens: int = 0
    fault: str = ""
    """Why it cannot be used; empty when it can."""
    routing: np.ndarray | None = None
    """As in paceline.routing, where it was asked for."""
    routing_parts: list[np.ndarray] = field(default_factory=list)


def sampling_params(config: SamplingConfig) -> pb.SamplingParams:
    """The wire form of a run file's sampling table."""
    return pb.SamplingParams(
        temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, max_new_tokens=config.max_new_tokens,
        stop=config.stop, stop_token_ids=config.stop_token_ids,
    )  # fmt: skip


class GenerationClient:
    """Asks the router for samples."""

    def __init__(self, stub: router_grpc.RouterServiceAsyncStub, run_id: str) -> None:
        self._stub = stub
        self._run_id = run_id

    async def generate(
        self, request_id: str, prompt_ids: list[int], sampling: SamplingConfig, seeds: list[int], gate: pb.VersionGate,
        session_id: str, timeout: float, with_routing: bool = False,
    ) -> list[Sequence]:  # fmt: skip
        """One sequence for each seed, in their order. PacelineError of the router as it is; DeadlineExceeded after
        `timeout` seconds. A sequence whose output does not hold together has a `fault`; its siblings stand.
        `with_routing` also asks for the experts of each token."""
        request = pb.GenerationInput(
            request_id=request_id, run_id=self._run_id,
            prompt_token_ids=arrays.to_wire(np.asarray(prompt_ids, dtype=np.int32)),
            sampling=sampling_params(sampling), seeds=seeds, gate=gate, session_id=session_id, stream=False,
            return_routing=with_routing,
        )  # fmt: skip
        sequences = [Sequence() for _ in seeds]
        try:
            async for response in self._stub.Generate(router_pb.GenerateRequest(input=request), timeout=timeout):
                output = response.output
                if not 0 <= output.index < len(sequences):
                    raise errors.PacelineError(f"request {request_id}: sample {output.index} of {len(seeds)} came back")
                add_output(sequences[output.index], output)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        for sequence in sequences:
            if not sequence.fault and sequence.reason == pb.FINISH_REASON_UNSPECIFIED:
                sequence.fault = "the stream ended before the sample did"
            if with_routing:
                join_routing(sequence, len(prompt_ids))
        return sequences

    async def abort(self, request_id: str) -> None:
        """End a request that an earlier caller of the same id left behind."""
        try:
            await self._stub.Abort(router_pb.AbortRequest(request_ids=[request_id]), timeout=ABORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error) from error

    async def could_serve(self, gate: pb.VersionGate) -> bool:
        """Whether an engine can take a request with this gate now. False also when the router does not answer."""
        try:
            response = await self._stub.ListEngines(router_pb.ListEnginesRequest(), timeout=ABORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                raise
            return False
        return any(not engine.excluded_reason and admits(gate, engine.weight_version) for engine in response.engines)


def add_output(sequence: Sequence, output: pb.GenerationOutput) -> None:
    """Append what one message brought; what does not hold together becomes the sequence's fault."""
    try:
        chunk = read_output(output)
    except MalformedOutput as error:
        sequence.fault = f"the router sent {error}"
        return
    sequence.fault = sequence.fault or chunk.fault
    sequence.token_ids += chunk.token_ids.tolist()
    sequence.logprobs += chunk.logprobs.tolist()
    join_spans(sequence.spans, chunk.spans)
    if chunk.routing is not None:
        sequence.routing_parts.append(chunk.routing)
    sequence.engine_id = output.engine_id or sequence.engine_id
    if chunk.finish is not None:
        sequence.reason = chunk.finish.reason
        sequence.num_cached_tokens = chunk.finish.num_cached_tokens


def join_routing(sequence: Sequence, num_prompt_tokens: int) -> None:
    """Make one array of the parts; what does not hold together becomes the sequence's fault.

    The router may end a sample as aborted after more rows than tokens; those too many are left out.
    """
    parts, sequence.routing_parts = sequence.routing_parts, []
    if sequence.fault or not sequence.token_ids:
        return
    wanted, found = num_prompt_tokens + len(sequence.token_ids) - 1, sum(len(part) for part in parts)
    if len({(part.dtype, part.shape[1:]) for part in parts}) > 1:
        sequence.fault = "its routing came in parts of different shapes"
    elif found < wanted or (found > wanted and sequence.reason != pb.FINISH_REASON_ABORT):
        sequence.fault = f"its routing covers {found} tokens, not the {wanted} that were read"
    elif parts:
        sequence.routing = np.concatenate(parts)[:wanted]


class Deadline:
    """The time that one attempt has; every call inside it gets what is left."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = asyncio.get_running_loop().time() + seconds

    @property
    def left(self) -> float:
        """Seconds until the end, never below zero."""
        return max(0.0, self._end - asyncio.get_running_loop().time())
