"""Evaluations: due at the right steps, pinned, recorded once, and never in the way of what is in flight."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio
from rollout_world import World, open_world, run_file, until

from paceline.api.rollout.v1 import rollout_service_pb2 as pb
from paceline.api.rollout.v1 import rollout_service_pb2_grpc as pb_grpc
from paceline.config import RunFile
from paceline.rpc import errors
from paceline.rpc.client import open_channel
from paceline.rpc.server import RpcServer
from services.rollout.evaluation import is_due


def evaluated(folder: Path, every: int = 2, samples: int = 2, **sections: Any) -> RunFile:
    """A run with one evaluation "held_out" over three prompts."""
    path = folder / "held_out.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n{"prompt": "c"}\n')
    table = {
        "name": "held_out", "source": {"name": "jsonl", "path": str(path)}, "num_prompts": 8,
        "samples_per_prompt": samples, "every_steps": every, "sampling": {"temperature": 0.7, "max_new_tokens": 5},
    }  # fmt: skip
    return run_file(folder, evaluation=[table], **sections)


async def evaluate(service: Any, request: pb.EvaluateRequest) -> pb.EvaluateResponse:
    """Ask over a real socket."""
    server = RpcServer(service.status)
    pb_grpc.add_RolloutServiceServicer_to_server(service.servicer, server.server)
    channel = open_channel(server.bind("127.0.0.1:0"))
    await server.start()
    try:
        return await pb_grpc.RolloutServiceStub(channel).Evaluate(request, timeout=20)
    except grpc.aio.AioRpcError as error:
        raise errors.from_rpc(error) from error
    finally:
        await channel.close()
        await server.stop(0)


def steps(world: World) -> list[int]:
    return [record.step for record in world.coordinator.records]


async def test_evaluated_before_training_at_every_second_step_and_at_the_last(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = evaluated(tmp_path, run={"steps": 3})
    async with open_world(config, redis_client) as world, world.rollout():
        await world.train(range(1, 4))
        await until(lambda: len(world.coordinator.records) == 3, "the last step is evaluated")
    assert steps(world) == [0, 2, 3]
    assert [record.weight_version for record in world.coordinator.records] == [1, 3, 4]
    values = world.coordinator.records[0].values
    assert values["evaluation_prompts"] == 3
    assert (values["reward_mean"], values["pass_at_1"], values["pass_at_k"]) == (0.5, 0.5, 1.0)
    assert (values["reward_missing"], values["response_length_mean"]) == (0, 3.0)


async def test_a_version_is_evaluated_before_its_training_groups_are_issued(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    async with open_world(evaluated(tmp_path, every=1), redis_client) as world, world.rollout():
        await world.train(range(1, 5))
        await until(lambda: len(world.coordinator.records) == 5, "all steps")
    order = [(r.gate.exact_version, r.session_id.startswith("eval-")) for r in world.router.requests]
    assert order == [item for v in range(1, 5) for item in [(v, True)] * 3 + [(v, False)] * 4] + [(5, True)] * 3


async def test_a_restarted_process_repeats_no_evaluation(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    async with open_world(evaluated(tmp_path, every=1), redis_client) as world:
        async with world.rollout():
            await world.train(range(1, 2))
            await until(lambda: steps(world) == [0, 1], "two evaluations")
            await until(lambda: len(world.router.requests) >= 14, "step 2 is being made")
        async with world.rollout():
            await world.train(range(2, 3))
            await until(lambda: steps(world) == [0, 1, 2], "the next one")
    seeds = {tuple(r.seeds) for r in world.router.requests if r.session_id == "eval-held_out-0"}
    assert len(seeds) == 1, "every evaluation asks the same questions under the same seeds"


async def test_missing_rewards_are_missing_and_not_wrong(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    async with open_world(evaluated(tmp_path, every=1, rollout={"max_attempts": 1}), redis_client) as world:
        world.reward.values = {"eval-held_out-0": [None, 1.0], "eval-held_out-1": [None, None]}
        world.router.refuse = {"eval-held_out-2": (grpc.StatusCode.INTERNAL, "boom")}
        async with world.rollout():
            await until(lambda: world.coordinator.records, "evaluated")
    values = world.coordinator.records[0].values
    assert (values["reward_missing"], values["pass_at_1"], values["reward_mean"]) == (5, 1.0, 1.0)


async def test_while_an_evaluation_runs_new_prompts_wait_and_running_ones_go_on(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    rollout = {"max_staleness": "unbounded", "max_in_flight": 4}
    async with open_world(evaluated(tmp_path, every=0, rollout=rollout, run={"steps": 8}), redis_client) as world:
        world.router.open.clear()
        world.router.hang = {"eval-held_out-2"}
        async with world.rollout() as service:
            await until(lambda: len(world.router.requests) == 4, "in flight")
            request = pb.EvaluateRequest(request_id="r1", name="held_out")
            asked = asyncio.create_task(evaluate(service, request))
            await until(lambda: len(world.router.requests) == 7, "the evaluation is in flight as well")
            world.router.open.set()
            activity = service.status.activity("production")
            await until(lambda: "the evaluation held_out that was asked for" in activity.waiting_for, "held back")
            await until(lambda: service.production.num_in_flight == 0, "what was in flight ended")
            assert (await world.ledger.account()).buffered == 4
            assert len(world.router.requests) == 7
            world.router.hang = set()
            (result,) = (await asked).results
            assert (result.weight_version, result.num_prompts, result.num_missing) == (1, 3, 0)
            await until(lambda: len(world.router.requests) == 35, "production goes on")
            assert (await evaluate(service, request)).results[0] == result
            assert len(world.router.requests) == 35, "a repeat is answered from memory"


async def test_what_cannot_be_evaluated_is_refused_with_the_reason(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    async with open_world(evaluated(tmp_path, every=0), redis_client) as world, world.rollout() as service:
        await world.train(range(1, 2))
        with pytest.raises(errors.NotFound, match="the run has held_out"):
            await evaluate(service, pb.EvaluateRequest(request_id="a", name="heldout"))
        with pytest.raises(errors.InvalidArgument, match="request_id"):
            await evaluate(service, pb.EvaluateRequest(name="held_out"))
        with pytest.raises(errors.NotFound, match="never published"):
            await evaluate(service, pb.EvaluateRequest(request_id="b", name="held_out", weight_version=77))
        with pytest.raises(errors.FailedPrecondition, match="version 1 is gone"):
            await evaluate(service, pb.EvaluateRequest(request_id="c", name="held_out", weight_version=1))


async def test_an_evaluation_that_training_overtakes_moves_on(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = evaluated(tmp_path, every=1, rollout={"max_staleness": "unbounded"})
    async with open_world(config, redis_client) as world:
        world.router.served = 2
        async with world.rollout() as service:
            await until(lambda: "the router" in service.status.activity("evaluation").waiting_for, "version 1 is gone")
            await world.publish(1)
            await until(lambda: world.coordinator.records, "evaluated at the newest version")
    assert (world.coordinator.records[0].step, world.coordinator.records[0].weight_version) == (1, 2)


@pytest.mark.parametrize(
    ("step", "last", "due"),
    [(0, None, True), (1, 0, False), (2, 0, True), (2, 2, False), (3, 2, False), (5, 2, True), (9, 8, True),
     (9, 9, False), (3, 4, False), (3, None, True)],
)  # fmt: skip
def test_when_an_evaluation_is_due(tmp_path: Path, step: int, last: int | None, due: bool) -> None:
    assert is_due(evaluated(tmp_path, every=2).evaluation[0], step, last, final=9) is due
