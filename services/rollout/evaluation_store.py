"""Which evaluations were done: remembered in Redis, so that a restarted process repeats none."""

from __future__ import annotations

import redis.asyncio

from paceline.api.rollout.v1 import rollout_service_pb2 as pb
from paceline.cancellation import cancellable
from paceline.ids import redis_prefix

_DAY_SECONDS = 86_400


class EvaluationStore:
    """The last evaluated step of every evaluation, and the answers to Evaluate requests of the last day."""

    def __init__(self, client: redis.asyncio.Redis, run_id: str) -> None:
        self._client = client
        self._prefix = redis_prefix(run_id, "rollout:evaluation")

    async def last_step(self, name: str) -> int | None:
        """The last step that was evaluated, None before the first."""
        found = await cancellable(self._client.hget(f"{self._prefix}steps", name))  # type: ignore[arg-type]
        return None if found is None else int(found)

    async def set_last_step(self, name: str, step: int) -> None:
        """The record of this step is stored."""
        await cancellable(self._client.hset(f"{self._prefix}steps", name, str(step)))  # type: ignore[arg-type]

    async def answer(self, request_id: str) -> pb.EvaluateResponse | None:
        """What a request with this id was answered."""
        found = await cancellable(self._client.get(f"{self._prefix}answer:{request_id}"))
        return pb.EvaluateResponse.FromString(found) if isinstance(found, bytes) else None

    async def set_answer(self, request_id: str, response: pb.EvaluateResponse) -> None:
        """Keep an answer for a day."""
        key = f"{self._prefix}answer:{request_id}"
        await cancellable(self._client.set(key, response.SerializeToString(), ex=_DAY_SECONDS))
