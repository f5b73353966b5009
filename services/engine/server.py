"""EngineService: decode, call the backend, encode. What is true of every backend is checked here."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import grpc.aio

from paceline.api.engine.v1 import engine_service_pb2 as pb
from paceline.api.engine.v1 import engine_service_pb2_grpc as pb_grpc
from paceline.ids import new_id
from paceline.rpc import errors
from paceline.rpc.status import StatusBoard
from paceline.telemetry import names
from paceline.telemetry.tracing import current_traceparent, record_span
from services.engine import wire
from services.engine.backends.base import EngineBackend
from services.engine.generation import Load, PauseMode, Request, check_gate

MAX_PAUSE_SECONDS = 600.0
REMEMBERED_PAUSES = 256

_MODES: dict[int, PauseMode] = {
    pb.PAUSE_MODE_IN_PLACE: "in_place",
    pb.PAUSE_MODE_RETRACT: "retract",
    pb.PAUSE_MODE_ABORT: "abort",
    pb.PAUSE_MODE_DRAIN: "drain",
}


class EngineServer(pb_grpc.EngineServiceServicer):
    """The gRPC surface of one engine."""

    def __init__(self, backend: EngineBackend, board: StatusBoard, max_sequence_length: int) -> None:
        self._backend = backend
        self._board = board
        self._pauses: dict[str, int] = {}
        self._max_sequence_length = max_sequence_length

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        self._require_loaded()
        wanted = wire.read_request(request.input, self._max_sequence_length, self._backend.vocabulary)
        if request.input.run_id and request.input.run_id != self._board.run_id:
            raise errors.InvalidArgument(
                f"input.run_id = {request.input.run_id!r}; this engine serves run {self._board.run_id!r}"
            )
        if wanted.with_routing and not self._backend.records_routing:
            raise errors.InvalidArgument(
                "input.return_routing = true: this engine does not record routing; set engine.record_routing = true"
            )
        check_gate(wanted, self._backend.weight_version)
        began = time.time()
        generation = self._backend.submit(wanted)
        num_tokens, num_cached, finished, version = 0, 0, False, self._backend.weight_version
        self.show_load()
        try:
            async for pieces in generation:
                for piece in pieces:
                    num_tokens += len(piece.token_ids)
                    num_cached += piece.finish.num_cached_tokens if piece.finish else 0
                    version = piece.weight_versions[-1] if piece.weight_versions else version
                    for output in wire.write_piece(piece, wanted, self._board.member_id):
                        yield pb.GenerateResponse(output=output)
            finished = True
        finally:
            if not finished:
                generation.cancel()
            self._record(wanted, began, generation.admitted_time, version, num_tokens, num_cached)
            self.show_load()

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        self._require_loaded()
        count = await self._backend.abort(None if request.all else list(request.request_ids))
        return pb.AbortResponse(num_aborted=count)

    async def Pause(self, request: pb.PauseRequest, context: grpc.aio.ServicerContext) -> pb.PauseResponse:
        mode = _MODES.get(request.mode)
        if mode is None:
            raise errors.InvalidArgument(f"mode = {request.mode}; give one of {', '.join(_MODES.values())}")
        if not 0 < request.deadline_seconds <= MAX_PAUSE_SECONDS:
            raise errors.InvalidArgument(
                f"deadline_seconds = {request.deadline_seconds:g}; it must be over 0 and at most {MAX_PAUSE_SECONDS:g}"
            )
        self._require_loaded()
        # A repeat that comes late must not pause again an engine that was resumed meanwhile.
        request_id = request.request_id or new_id()
        if request_id not in self._pauses:
            self._pauses[request_id] = await self._backend.pause(mode, request.deadline_seconds)
            while len(self._pauses) > REMEMBERED_PAUSES:
                self._pauses.pop(next(iter(self._pauses)))
        return pb.PauseResponse(num_running=self._pauses[request_id])

    async def Resume(self, request: pb.ResumeRequest, context: grpc.aio.ServicerContext) -> pb.ResumeResponse:
        self._require_loaded()
        await self._backend.resume()
        return pb.ResumeResponse()

    async def Probe(self, request: pb.ProbeRequest, context: grpc.aio.ServicerContext) -> pb.ProbeResponse:
        self._require_weights()
        began = time.monotonic()
        version = await self._backend.probe()
        return pb.ProbeResponse(weight_version=version, seconds=time.monotonic() - began)

    async def GetLoad(self, request: pb.GetLoadRequest, context: grpc.aio.ServicerContext) -> pb.GetLoadResponse:
        response = pb.GetLoadResponse(weight_version=self._backend.weight_version, state=self._board.state)
        if self._board.state != "STARTING":
            load = self.show_load()
            response.ranks.add(
                num_running=load.num_running, num_waiting=load.num_waiting, capacity=load.capacity,
                tokens_per_second=load.tokens_per_second,
            )  # fmt: skip
        return response

    def show_load(self) -> Load:
        """Put the load on the status board, and return it."""
        load = self._backend.load_numbers()
        self._board.gauges.update(
            running=float(load.num_running), waiting=float(load.num_waiting), capacity=float(load.capacity),
            tokens_per_second=load.tokens_per_second, cache_use=load.cache_use,
            generated_tokens_total=float(load.num_generated), busy_seconds_total=load.busy_seconds,
        )  # fmt: skip
        activity = self._board.activity("decode")
        doing = f"decoding {load.num_running} samples, {load.num_waiting} requests wait" if load.num_running else "idle"
        if (activity.doing, activity.waiting_for) != (doing, load.held_by):
            activity.set(doing)
            activity.waiting_for = load.held_by
        return load

    def _require_loaded(self) -> None:
        if self._board.state == "STARTING":
            raise errors.Unavailable("engine is loading its model; try again when it is READY", 0.5)

    def _require_weights(self) -> None:
        self._require_loaded()
        if self._backend.weight_version == 0:
            raise errors.Unavailable("engine holds no published weight version yet; try again when it is READY", 0.5)

    def _record(
        self, request: Request, began: float, admitted: float | None, version: int, num_tokens: int, num_cached: int
    ) -> None:
        """The two spans of a request, under the span of the call."""
        now, parent = time.time(), current_traceparent() or None
        record_span(names.SPAN_ENGINE_QUEUE, began, admitted or now, parent=parent)
        if admitted is None:
            return
        attributes = {
            names.ATTRIBUTE_ENGINE_ID: self._board.member_id,
            names.ATTRIBUTE_WEIGHT_VERSION: version,
            names.ATTRIBUTE_TOKENS: num_tokens,
            names.ATTRIBUTE_CACHED_TOKENS: num_cached,
        }
        record_span(names.SPAN_ENGINE_GENERATE, admitted, now, attributes, parent)
