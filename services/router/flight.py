"""One request on its way: placed, relayed, and placed again for what is unfinished when its engine fails."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio

from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.engine.v1 import engine_service_pb2 as engine_pb
from paceline.bell import heard
from paceline.rpc import errors
from paceline.telemetry import names, tracing
from paceline.weights.gate import admits
from services.router.placement import Placement, Wanted
from services.router.policies.base import Placing
from services.router.progress import Diverged, EngineFault, SampleProgress
from services.router.table import EngineTable, Rank
from services.router.versions import PublishedVersions

log = logging.getLogger(__name__)

ABORT_SECONDS = 1.0
"""How long an engine may take to end a request by itself before its call is cancelled."""
GATE_RETRY_SECONDS = 0.1
FAILURE_RETRY_SECONDS = 0.2
_QUEUE_MESSAGES = 256
DP_RANK_KEY = "paceline-dp-rank"
"""Metadata that tells an engine of several data-parallel ranks which one was chosen."""


class Flight:
    """A request from arrival to end, in a task of its own. `abort` and `evict` may come at any time."""

    def __init__(
        self, request: generation_pb.GenerationInput, deadline: float, table: EngineTable, placement: Placement,
        versions: PublishedVersions, max_retries: int,
    ) -> None:  # fmt: skip
        self.request = request
        self.deadline = deadline
        """Loop time at which the router gives up: a little before the caller does, so that the reason arrives."""
        self.rank: Rank | None = None
        self.done = asyncio.Event()
        self._table = table
        self._placement = placement
        self._versions = versions
        self._max_retries = max_retries
        self._num_prompt_tokens = sum(request.prompt_token_ids.shape)
        self._samples = [SampleProgress(index, seed) for index, seed in enumerate(request.seeds)]
        self._queue: asyncio.Queue[generation_pb.GenerationOutput | BaseException | None] = asyncio.Queue(
            _QUEUE_MESSAGES
        )
        self._avoid: dict[Any, float] = {}
        self._attempts = 0
        self._failures = 0
        self._last_failure = ""
        self._call: Any = None
        self._aborted = False
        self._evicted = False
        self._task: asyncio.Task[None] | None = None

    def start(self, closed: Callable[[], None]) -> None:
        """Begin; `closed` is called at the end."""
        self._task = asyncio.create_task(self._run(), name=f"generate {self.request.request_id}")
        self._task.add_done_callback(lambda _: closed())

    def cancel(self) -> None:
        """The caller went away: end the work wherever it is."""
        if self._task is not None:
            self._task.cancel()

    async def outputs(self) -> AsyncIterator[generation_pb.GenerationOutput]:
        """What the caller is to get, in order; raises the PacelineError that ended the request."""
        while (item := await self._queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item

    @property
    def engine_request_id(self) -> str:
        """Id of the running attempt on its engine: the request's own, then with "#2", "#3"."""
        own = self.request.request_id
        return own if self._attempts <= 1 else f"{own}#{self._attempts}"

    async def abort(self) -> None:
        """End the request; each unfinished sample finishes as aborted with the tokens it has."""
        self._aborted = True
        if self.rank is None or self._call is None:
            self._table.notify()
            return
        await self._abort_on_engine(self.rank)
        if not await heard(self.done, ABORT_SECONDS):
            log.warning("engine %s did not end %s; its call is cancelled", self.rank.key[0], self.engine_request_id)
            if self._call is not None:
                self._call.cancel()

    def evict(self) -> None:
        """Leave the engine, which is lost, for another one."""
        if self._call is not None and not self._evicted:
            self._evicted = True
            self._call.cancel()

    def wanted(self) -> Wanted:
        """What the rest of the request asks of an engine."""
        rest = self._unfinished()
        begun = [sample.versions for sample in rest if sample.sent and sample.repeatable]
        placing = Placing(
            self.request.request_id, self.request.session_id, max(len(rest), 1), self._num_prompt_tokens
        )  # fmt: skip
        preferred = max(begun[0]) if begun else 0
        return Wanted(placing, self.request.gate, preferred, self._avoid, lambda: self._aborted)

    def _unfinished(self) -> list[SampleProgress]:
        return [sample for sample in self._samples if not sample.finished]

    async def _run(self) -> None:
        end: BaseException | None = None
        try:
            with tracing.span(names.SPAN_ROUTER_GENERATE) as span:
                try:
                    await self._generate()
                finally:
                    if self.rank is not None:
                        span.set_attribute(names.ATTRIBUTE_ENGINE_ID, self.rank.engine.engine_id)
                    versions = [version for sample in self._samples for version in sample.versions]
                    span.set_attribute(names.ATTRIBUTE_WEIGHT_VERSION, max(versions, default=0))
        except asyncio.CancelledError:
            if _cancelling():
                raise
            end = errors.Unavailable(f"request {self.request.request_id}: the router is stopping; try again", 0.5)
        except Exception as error:  # noqa: BLE001 - carried to the caller of outputs(), whose boundary makes it a code
            end = error
        finally:
            self.done.set()
        await self._queue.put(end)

    async def _generate(self) -> None:
        while rest := self._unfinished():
            if self._aborted:
                await self._finish_aborted(rest)
                return
            rank = await self._place()
            if rank is None:
                continue
            self.rank = rank
            try:
                await self._finish_unrepeatable(rank)
                if (going := self._unfinished()) and not self._aborted:
                    await self._attempt(rank, going)
            finally:
                if self._call is not None:
                    self._call.cancel()
                self._call = None
                self._placement.release(rank, len(rest))

    async def _place(self) -> Rank | None:
        """A rank, or None when the request was aborted while it waited."""
        with tracing.span(names.SPAN_ROUTER_QUEUE):
            try:
                return await self._placement.place(self.wanted(), self.deadline)
            except errors.DeadlineExceeded as error:
                raise self._with_failure(error) from error

    async def _attempt(self, rank: Rank, rest: list[SampleProgress]) -> None:
        """Run the unfinished samples on one engine; returns for another attempt, raises for the end."""
        self._attempts += 1
        self._evicted = False
        for sample in rest:
            sample.restart()
        request = engine_pb.GenerateRequest(input=self.request)
        request.input.request_id = self.engine_request_id
        del request.input.seeds[:]
        request.input.seeds.extend(sample.seed for sample in rest)
        remaining = self.deadline - asyncio.get_running_loop().time()
        self._call = rank.engine.stub.Generate(
            request, timeout=max(remaining, 0.001), metadata=((DP_RANK_KEY, str(rank.dp_rank)),)
        )
        try:
            async for message in self._call:
                await self._relay(rank, message.output, rest)
            if unfinished := self._unfinished():
                raise EngineFault(f"ended the stream with {len(unfinished)} samples unfinished")
        except grpc.aio.AioRpcError as error:
            self._judge(rank, error)
        except EngineFault as fault:
            self._fail(rank, str(fault))
        except asyncio.CancelledError:
            if _cancelling() or not (self._aborted or self._evicted):
                # The caller is gone. The engine is told by name too, so that a retry finds the slots free.
                await asyncio.shield(self._abort_on_engine(rank))
                raise
            if self._evicted and not self._aborted:
                self._fail(rank, f"was lost ({self._table.excluded_reason(rank.engine)})")

    async def _relay(self, rank: Rank, output: generation_pb.GenerationOutput, rest: list[SampleProgress]) -> None:
        if not 0 <= output.index < len(rest):
            raise EngineFault(f"sent sample index {output.index} of {len(rest)}")
        sample = rest[output.index]
        await self._check_versions(rank, output)
        output.index = sample.index
        if sample.diverged:
            return
        try:
            forward = sample.accept(output)
        except Diverged as difference:
            log.info("request %s: %s; it ends with what was sent", self.request.request_id, difference)
            sample.diverged = True
            forward = sample.aborted(self._num_prompt_tokens)
        if forward is not None:
            forward.engine_id = forward.engine_id or rank.engine.engine_id
            forward.dp_rank = rank.dp_rank
            await self._queue.put(forward)

    async def _check_versions(self, rank: Rank, output: generation_pb.GenerationOutput) -> None:
        """Refuse tokens of weights that were never published, or that the gate does not admit."""
        for span in output.version_spans:
            version = span.weight_version
            if not self._versions.known(version) and not await self._versions.is_published(version):
                reason = f"answered with weight version {version}, which was never published"
                self._table.set_quarantine(rank.engine, reason)
                raise EngineFault(reason)
            if not admits(self.request.gate, version):
                raise EngineFault(f"answered with weight version {version} against {self.wanted().gate_text}")

    def _judge(self, rank: Rank, error: grpc.aio.AioRpcError) -> None:
        """What an engine's error means: the caller's fault, not now, or the engine's fault."""
        code, meant = error.code(), errors.from_rpc(error)
        now = asyncio.get_running_loop().time()
        if self._aborted:
            return
        if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED):
            raise meant
        if code == grpc.StatusCode.DEADLINE_EXCEEDED and now >= self.deadline - 0.01:
            raise self._late(rank)
        if code == grpc.StatusCode.RESOURCE_EXHAUSTED and meant.retry_delay is not None:
            self._avoid[rank.engine] = now + meant.retry_delay
        elif code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.ABORTED):
            self._avoid[rank.engine] = now + GATE_RETRY_SECONDS
        else:
            if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
                self._table.mark_unhealthy(rank.engine, f"generate failed: {code.name} {meant.message}")
            self._fail(rank, f"failed: {code.name} {meant.message}")

    def _fail(self, rank: Rank, reason: str) -> None:
        self._failures += 1
        self._last_failure = f"{rank.engine.engine_id} {reason}"
        log.warning("request %s: %s", self.request.request_id, self._last_failure)
        if self._failures > self._max_retries:
            raise errors.Unavailable(
                f"request {self.request.request_id}: {self._failures} engines failed it "
                f"(router.max_retries = {self._max_retries}); the last: {self._last_failure}",
                FAILURE_RETRY_SECONDS,
            )
        self._avoid[rank.engine] = asyncio.get_running_loop().time() + FAILURE_RETRY_SECONDS

    def _late(self, rank: Rank) -> errors.DeadlineExceeded:
        return errors.DeadlineExceeded(
            f"request {self.request.request_id}: {len(self._unfinished())} of {len(self._samples)} samples were "
            f"unfinished on {rank.engine.engine_id} at its deadline"
        )

    def _with_failure(self, error: errors.DeadlineExceeded) -> errors.DeadlineExceeded:
        suffix = f"; before that {self._last_failure}" if self._last_failure else ""
        return errors.DeadlineExceeded(error.message + suffix)

    async def _finish_unrepeatable(self, rank: Rank) -> None:
        """End samples that this engine cannot go on with: what was sent of them is of other weights."""
        for sample in self._unfinished():
            if sample.sent and sample.versions != {rank.engine.weight_version}:
                await self._queue.put(sample.aborted(self._num_prompt_tokens))

    async def _finish_aborted(self, rest: list[SampleProgress]) -> None:
        for sample in rest:
            await self._queue.put(sample.aborted(self._num_prompt_tokens))

    async def _abort_on_engine(self, rank: Rank) -> None:
        request = engine_pb.AbortRequest(request_ids=[self.engine_request_id])
        try:
            await rank.engine.stub.Abort(request, timeout=ABORT_SECONDS)
        except grpc.aio.AioRpcError as error:
            log.info("abort of %s on %s: %s", self.engine_request_id, rank.engine.engine_id, error.code().name)


def _cancelling() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
