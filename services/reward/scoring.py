"""From outcomes of graders to rewards: a weighted sum when all components have values, else the first one's reason."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from paceline.api.common.v1 import reward_pb2
from services.reward.catalog import KnownGrader
from services.reward.pool import Outcome, Pool


@dataclass(frozen=True)
class ItemToScore:
    """One trajectory, decoded and checked."""

    sample_id: str
    response: str
    prompt: str
    metadata: dict[str, Any]

    def task(self) -> dict[str, Any]:
        return {"response": self.response, "prompt": self.prompt, "metadata": self.metadata}


async def score(
    pool: Pool, graders: Sequence[KnownGrader], items: Sequence[ItemToScore], limit: float, deadline: float | None
) -> list[reward_pb2.Reward]:
    """Rewards in the order of `items`, all graded at once over the pool's workers.

    `limit` is the wall time of one item and grader in seconds. What is not graded at `deadline` (event loop time) is
    missing as NOT_GRADED, so that the others still arrive. ResourceExhausted and Unavailable as the pool says.
    """
    with pool.admit(len(items) * len(graders)):
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    [group.create_task(_grade(pool, grader, item, limit, deadline)) for grader in graders]
                    for item in items
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from failed
    return [combine(graders, [task.result() for task in row]) for row in tasks]


async def _grade(pool: Pool, grader: KnownGrader, item: ItemToScore, limit: float, deadline: float | None) -> Outcome:
    try:
        async with asyncio.timeout_at(deadline):
            return await pool.grade(grader.task, item.task(), limit)
    except TimeoutError:
        return Outcome(missing="NOT_GRADED", detail="the deadline of the call came before the grader's verdict")


def combine(graders: Sequence[KnownGrader], outcomes: Sequence[Outcome]) -> reward_pb2.Reward:
    """One reward from the outcomes of its graders, in their order."""
    reward = reward_pb2.Reward()
    total = 0.0
    for grader, outcome in zip(graders, outcomes, strict=True):
        component = reward.components.add(name=grader.name, weight=grader.weight, seconds=outcome.seconds)
        if outcome.value is None:
            component.missing.CopyFrom(_missing(outcome.missing, outcome.detail))
            if not reward.HasField("missing"):
                reward.missing.CopyFrom(_missing(outcome.missing, f"{grader.name}: {outcome.detail}"))
        else:
            component.value = outcome.value
            total += grader.weight * outcome.value
    if reward.HasField("missing"):
        return reward
    if math.isfinite(total):
        reward.value = total
    else:
        reward.missing.CopyFrom(_missing("INVALID", f"the weighted sum is {total}"))
    return reward


def _missing(reason: str, detail: str) -> reward_pb2.MissingReward:
    # An exception may quote half a character of a response; protobuf takes whole ones only.
    text = detail.encode("utf-8", "replace").decode()
    return reward_pb2.MissingReward(reason=reward_pb2.MissingReason.Value(f"MISSING_REASON_{reason}"), detail=text)
