"""The trainer as a process, with a real coordinator and Redis: it trains, survives kill -9, and ends the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
from scripted_rollout import ScriptedRollout
from trainer_run import CALL, END_SECONDS, GROUPS, STEPS, exported, start_run

from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.ids import new_id
from paceline.ledger import Ledger

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
async def undisturbed(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis
) -> tuple[bytes, dict[int, pb.StepRecord]]:
    """Final weights and records of a run that nothing disturbs."""
    async with start_run(tmp_path, redis_url, redis_client) as run:
        assert await run.trainer.wait(END_SECONDS) == 0, run.trainer.log()
        return exported(run), await run.records()


async def test_trains_to_the_end(tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis) -> None:
    async with start_run(tmp_path, redis_url, redis_client) as run:
        assert await run.trainer.wait(END_SECONDS) == 0, run.trainer.log()
        assert await run.state() == pb.RUN_STATE_FINISHED
        account = await run.ledger.account(recount=True)
        assert account.balanced and account.committed == STEPS * GROUPS
        assert run.rollout.versions == [(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)]
        records = await run.records()
        assert [records[step].weight_version for step in range(1, STEPS + 1)] == [2, 3, 4, 5]
        assert records[1].group_ids == ["e0.0", "e0.1"]
        assert records[2].values["staleness_max"] == 0
        assert records[2].values["optimizer_updates"] == 1
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
        marker = json.loads((run.directory / "export" / "paceline-export.json").read_text())
        assert marker["complete"] and marker["step"] == STEPS
        names = sorted(path.name for path in (run.directory / "checkpoints").iterdir())
        assert names == ["latest", "step-000003", "step-000004"]


async def test_kill_after_every_step_changes_nothing(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis, undisturbed: Any
) -> None:
    weights, calm = undisturbed
    # Kills after steps 1 and 2 make it replay recorded steps; the one after step 3 meets a checkpoint.
    async with start_run(tmp_path, redis_url, redis_client, "trainer.checkpoint_every=3") as run:
        for step in (1, 2, 3):
            await run.wait_for_step(step)
            await run.trainer.restart()
        assert await run.trainer.wait(END_SECONDS) == 0, run.trainer.log()
        assert exported(run) == weights
        records = await run.records()
        assert [list(records[step].group_ids) for step in sorted(records)] == [
            list(calm[step].group_ids) for step in sorted(calm)
        ]
        assert [records[step].values["loss"] for step in sorted(records)] == [
            calm[step].values["loss"] for step in sorted(calm)
        ]
        assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4]
        assert [step for _, step in run.rollout.versions] == [0, 1, 2, 3, 4]
        account = await run.ledger.account(recount=True)
        assert account.balanced and account.committed == STEPS * GROUPS


async def test_degenerate_steps_train_nothing_and_the_run_goes_on(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    async with start_run(tmp_path, redis_url, redis_client) as run:
        run.rollout.rewards = {0: [1.0, 1.0], 1: [None, None], 2: [None, 3.0]}
        assert await run.trainer.wait(END_SECONDS) == 0, run.trainer.log()
        records = await run.records()
        assert [records[step].values["optimizer_updates"] for step in (1, 2, 3, 4)] == [0, 0, 0, 1]
        assert [records[step].values["groups_zero_variance"] for step in (1, 2, 3)] == [2, 0, 2]
        assert [records[step].values["groups_without_reward"] for step in (1, 2, 3)] == [0, 2, 0]
        assert [records[step].values["reward_missing"] for step in (1, 2, 3)] == [0, 4, 2]
        assert "reward_mean" not in records[2].values and records[3].values["reward_mean"] == 3.0
        assert [step for _, step in run.rollout.versions] == [0, 1, 2, 3, 4]


async def test_lost_redis_comes_back_from_the_checkpoint(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    async with start_run(tmp_path, redis_url, redis_client) as run:
        await run.wait_for_step(2)
        await run.trainer.kill()
        await run.stop_rollout()
        seen = run.rollout.versions[-1][0]
        await redis_client.flushall()
        await run.coordinator.restart()
        await run.stub.CreateRun(
            pb.CreateRunRequest(request_id=new_id(), run_id=run.run_id, config_digest="d", num_steps=STEPS), **CALL
        )
        await run.trainer.start()
        run.rollout = ScriptedRollout(redis_client, run.stub, run.run_id, GROUPS, STEPS)
        run.start_rollout()
        assert await run.trainer.wait(END_SECONDS) == 0, run.trainer.log()
        assert run.rollout.versions[0][0] > seen - 1
        account = await Ledger(redis_client, run.run_id).account(recount=True)
        assert account.balanced and account.trained == STEPS * GROUPS


async def test_a_stopped_run_ends_the_trainer(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    async with start_run(tmp_path, redis_url, redis_client, steps=1000) as run:
        await run.wait_for_step(1)
        request = pb.FinishRunRequest(
            request_id=new_id(), run_id=run.run_id, state=pb.RUN_STATE_STOPPED, reason="enough"
        )
        await run.stub.FinishRun(request, **CALL)
        assert await run.trainer.wait(END_SECONDS) == 0, run.trainer.log()
        assert await run.state() == pb.RUN_STATE_STOPPED
