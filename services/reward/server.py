"""The RewardService: decode and check, score, encode."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import grpc.aio

from paceline.api.reward.v1 import reward_service_pb2 as pb
from paceline.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from paceline.rpc import errors
from paceline.rpc.deadlines import own_seconds
from paceline.telemetry import names, tracing
from services.reward.catalog import Catalog, GraderRequest, KnownGrader
from services.reward.faults import Faults
from services.reward.pool import Pool
from services.reward.scoring import ItemToScore, score


class RewardServer(pb_grpc.RewardServiceServicer):
    """Answers from a pool of grader processes."""

    def __init__(self, pool: Pool, catalog: Catalog, run_id: str, timeout_seconds: float) -> None:
        self._pool = pool
        self._catalog = catalog
        self._run_id = run_id
        self._timeout_seconds = timeout_seconds
        self._faults = Faults()

    async def Score(self, request: pb.ScoreRequest, context: grpc.aio.ServicerContext) -> pb.ScoreResponse:
        if request.run_id != self._run_id:
            raise errors.InvalidArgument(f"run_id {request.run_id!r} is not this service's run {self._run_id!r}")
        limit = _limit(request.timeout_seconds, self._timeout_seconds)
        deadline = asyncio.get_running_loop().time() + own_seconds(context.time_remaining())
        items = [decode_item(item) for item in request.items]
        requests = [decode_grader(spec, f"graders[{index}]") for index, spec in enumerate(request.graders)]
        graders = await self._catalog.resolve(requests)
        check_metadata(graders, items)
        with tracing.span(names.SPAN_REWARD_SCORE, {names.ATTRIBUTE_GROUP_ID: request.group_id}):
            rewards = await score(self._pool, graders, items, limit, deadline)
        self._faults.add(request.group_id, [item.sample_id for item in items], rewards)
        return pb.ScoreResponse(rewards=rewards)

    async def ListGraders(
        self, request: pb.ListGradersRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListGradersResponse:
        return pb.ListGradersResponse(names=self._catalog.names())


def _limit(asked: float, own: float) -> float:
    if not math.isfinite(asked) or asked < 0:
        raise errors.InvalidArgument(f"timeout_seconds = {asked} must be 0 (the service's own, {own} s) or more")
    return asked or own


def decode_grader(spec: pb.GraderSpec, where: str) -> GraderRequest:
    """A grader of a request. InvalidArgument for an empty name or options that are not a JSON object."""
    if not spec.name:
        raise errors.InvalidArgument(f"{where}.name is empty; name a grader, as ListGraders tells them")
    options = _json_object(spec.options_json, f"{where}.options_json")
    return GraderRequest(spec.name, options, spec.weight, where)


def decode_item(item: pb.ScoreItem) -> ItemToScore:
    """An item of a request. InvalidArgument for metadata that is not a JSON object."""
    metadata = _json_object(item.metadata_json, f"metadata_json of sample {item.sample_id!r}")
    return ItemToScore(item.sample_id, item.response_text, item.prompt_text, metadata)


def check_metadata(graders: list[KnownGrader], items: list[ItemToScore]) -> None:
    """Refuse items without a field that a grader needs: the data is wrong, and a retry would not help."""
    for grader in graders:
        for item in items:
            for field in grader.required_metadata:
                if field not in item.metadata:
                    there = ", ".join(sorted(item.metadata)) or "none"
                    raise errors.InvalidArgument(
                        f"grader {grader.name!r} needs metadata field {field!r}, which sample {item.sample_id!r} lacks "
                        f"(it has: {there}); add it to the data, or name another field in the grader's options"
                    )


def _json_object(text: str, what: str) -> dict[str, Any]:
    try:
        value = json.loads(text) if text else {}
    except ValueError as error:
        raise errors.InvalidArgument(f"{what} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise errors.InvalidArgument(f"{what} must be a JSON object, not {text[:40]!r}")
    return value
