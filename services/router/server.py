"""RouterService: checks a request, hands it to a flight, and sends on what comes out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio

from paceline import arrays
from paceline.api.common.v1 import generation_pb2 as generation_pb
from paceline.api.router.v1 import router_service_pb2 as pb
from paceline.api.router.v1 import router_service_pb2_grpc as pb_grpc
from paceline.generation import MAX_SAMPLES
from paceline.rpc import errors
from paceline.rpc.deadlines import own_seconds
from services.router.flights import Flights
from services.router.placement import Placement
from services.router.table import EngineTable


class RouterServer(pb_grpc.RouterServiceServicer):
    """Decodes, calls, encodes."""

    def __init__(self, table: EngineTable, placement: Placement, flights: Flights, run_id: str) -> None:
        self._table = table
        self._placement = placement
        self._flights = flights
        self._run_id = run_id

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateResponse]:
        check_input(request.input, self._run_id)
        deadline = asyncio.get_running_loop().time() + own_seconds(context.time_remaining())
        flight = await self._flights.open(request.input, deadline)
        # The handler may be suspended in a write when the caller goes; the flight must end nevertheless.
        context.add_done_callback(lambda _: flight.cancel())  # type: ignore[arg-type]
        async for output in flight.outputs():
            yield pb.GenerateResponse(output=output)

    async def Abort(self, request: pb.AbortRequest, context: grpc.aio.ServicerContext) -> pb.AbortResponse:
        return pb.AbortResponse(num_aborted=await self._flights.abort(request.request_ids, request.all))

    async def ListEngines(
        self, request: pb.ListEnginesRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListEnginesResponse:
        response = pb.ListEnginesResponse(num_waiting=self._placement.num_waiting)
        for rank in self._table.ranks:
            engine = rank.engine
            response.engines.add(
                engine_id=engine.engine_id, address=engine.address, dp_rank=rank.dp_rank, state=engine.state,
                weight_version=engine.weight_version, num_in_flight=rank.num_in_flight, healthy=engine.healthy,
                excluded_reason=self._table.excluded_reason(engine), num_requests=rank.num_requests,
            )  # fmt: skip
        return response


def check_input(request: generation_pb.GenerationInput, run_id: str) -> None:
    """InvalidArgument names the field that no engine could accept."""
    if not request.request_id:
        raise errors.InvalidArgument("input.request_id is empty; give each request an id of its own")
    if request.run_id and request.run_id != run_id:
        raise errors.InvalidArgument(f"input.run_id {request.run_id!r} is not the run of this router, {run_id!r}")
    if not 1 <= len(request.seeds) <= MAX_SAMPLES:
        raise errors.InvalidArgument(
            f"input.seeds has {len(request.seeds)} entries; ask for 1 to {MAX_SAMPLES} samples, one seed each"
        )
    if request.sampling.max_new_tokens < 1:
        raise errors.InvalidArgument(
            f"input.sampling.max_new_tokens = {request.sampling.max_new_tokens}; it must be at least 1"
        )
    try:
        tokens = arrays.from_wire(request.prompt_token_ids, "input.prompt_token_ids", "int32")
        arrays.from_wire(request.prompt_token_ids, "input.prompt_token_ids", "int32", tokens.size)
    except ValueError as error:
        raise errors.InvalidArgument(str(error)) from error
    if tokens.size == 0:
        raise errors.InvalidArgument("input.prompt_token_ids is empty; give at least one token")
