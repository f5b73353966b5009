"""The loop's claim: rollout.max_attempts counts failed attempts, so it must not limit how often a group is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import redis.asyncio

from paceline.config import load_run_file
from paceline.ledger import Ledger
from paceline.rpc.status import StatusBoard
from paceline.stream import SampleStream
from paceline.testing.groups import make_group
from services.trainer.run.loop import TrainingLoop


async def test_a_group_that_is_refused_as_stale_is_issued_again_and_never_dropped(
    redis_client: redis.asyncio.Redis,
) -> None:
    ledger, stream = Ledger(redis_client, "r"), SampleStream(redis_client, "r", capacity=4)
    await ledger.initialise(dataset_size=1, epochs=1)
    config = load_run_file(
        Path("examples/sort4/run.toml"),
        ["run.steps=1", "rollout.groups_per_step=1", "rollout.max_staleness=0", "rollout.max_attempts=1"],
    )
    status = StatusBoard("trainer", "trainer-0", "i", "r")
    parts: Any = Mock(config=config, status=status, ledger=ledger, stream=stream, run_ended=lambda: False)
    loop = TrainingLoop(parts)
    loop._version = 3
    async with asyncio.timeout(30), asyncio.TaskGroup() as tasks:
        claiming = tasks.create_task(loop._claim(1))
        for attempt, version in enumerate((1, 2, 3), 1):
            token = ""
            while not (issued := await ledger.issue("a", 1, 1000, None)):
                token = await ledger.wait_change(token, 10)
            assert issued[0].attempt == attempt
            assert await stream.put(make_group("r", "e0.0", attempt, version)) == "accepted"
    claim = cast(Any, claiming.result())
    assert [group.oldest_version for group in claim.groups] == [3]
    assert (claim.refused, (await ledger.account()).dropped) == (2, {})
