"""Production against a real ledger: the right groups with the right weights, and none lost whatever happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest
import redis.asyncio
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rollout_world import open_world, run_file, until

from paceline.api.rollout.v1 import rollout_service_pb2 as pb
from paceline.ids import GroupId, sample_seed
from paceline.samples import FAILED
from paceline.telemetry import names, tracing

CALL: Any = None
"""No call of gRPC's: the servicer is asked directly."""


async def test_synchronous_steps_hold_the_next_groups_of_one_version(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    async with open_world(run_file(tmp_path), redis_client) as world, world.rollout() as service:
        await world.train(range(1, 5))
        await until(lambda: service.status.gauges.get("finished"), "the end is said")  # type: ignore[attr-defined]
        assert "every group of the run was issued" in service.status.activity("production").waiting_for  # type: ignore[attr-defined]
    for claim in world.claims:
        ids = sorted(GroupId.parse(group.group_id).index for group in claim.groups)
        first = (claim.step - 1) * 4
        assert ids == list(range(first, first + 4)), "data order"
        versions = {version for g in claim.groups for s in g.samples for version, _ in s.version_spans}
        assert versions == {claim.step}, "every token of a step comes from the version published before it"
    group = world.claims[0].groups[0]
    assert [s.seed for s in group.samples] == [sample_seed(11, group.group_id, i) for i in range(2)]
    assert group.samples[0].token_ids[: len(group.prompt_text)].tolist() == _ids(group.prompt_text)
    assert group.samples[0].loss_mask.tolist() == [0] * len(group.prompt_text) + [1, 1, 1]
    assert [s.reward_value for s in group.samples] == [0.0, 1.0]
    assert (await world.ledger.account(recount=True)).balanced


def _ids(text: str) -> list[int]:
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [alphabet.index(char) for char in text]


async def test_no_group_is_ever_staler_than_the_bound(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    config = run_file(tmp_path, run={"steps": 8}, rollout={"max_staleness": 2})
    async with open_world(config, redis_client) as world, world.rollout():
        await until(lambda: len(world.router.requests) >= 12, "rollout runs ahead")
        await world.train(range(1, 9), max_staleness=2)
    staleness = [c.trainer_version - g.oldest_version for c in world.claims for g in c.groups]
    assert max(staleness) == 2
    assert sum(c.refused for c in world.claims) == 0, "admission leaves nothing to refuse"
    assert len(world.router.requests) == 32


async def test_one_hung_group_is_dead_and_the_others_proceed(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    config = run_file(
        tmp_path, prompts=200, run={"steps": 1},
        rollout={"groups_per_step": 128, "buffer_groups": 128, "max_in_flight": 128, "group_deadline_seconds": 3.0,
                 "max_attempts": 1},
    )  # fmt: skip
    async with open_world(config, redis_client) as world:
        world.router.hang = {"e0.5"}
        async with world.rollout():
            await world.train(range(1, 2))
        account = await world.ledger.account(recount=True)
        (dead,) = await world.ledger.groups("dead")
    assert (account.trained, account.dead, account.balanced) == (128, 1, True)
    assert dead.group_id == "e0.5"
    assert dead.detail.startswith("DEADLINE_EXCEEDED: e0.5 was not finished after 3 s (generating)")


async def test_a_hung_group_does_not_die_while_no_engine_could_serve_it(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, rollout={"group_deadline_seconds": 0.5, "max_attempts": 1})
    async with open_world(config, redis_client) as world:
        world.router.open.clear()
        world.router.engines = False
        async with world.rollout():
            await until(lambda: len(world.router.requests) >= 12, "attempts were repeated")
            world.router.engines = True
            world.router.open.set()
            await world.train(range(1, 2))
        account = await world.ledger.account(recount=True)
    assert (account.dead, account.balanced) == (0, True)


@pytest.mark.parametrize("times", [1, 3])
async def test_killed_in_mid_production_and_started_again_nothing_is_lost(
    tmp_path: Path, redis_client: redis.asyncio.Redis, times: int
) -> None:
    async with open_world(run_file(tmp_path), redis_client) as world:
        for _ in range(times):
            world.router.open.clear()
            before = len(world.router.requests)
            async with world.rollout():
                await until(lambda before=before: len(world.router.requests) >= before + 2, "in mid-production")
        world.router.open.set()
        async with world.rollout():
            await world.train(range(1, 5))
        account = await world.ledger.account(recount=True)
    assert (account.trained, account.issued, account.dead, account.balanced) == (16, 16, 0, True)
    trained = sorted(GroupId.parse(g.group_id).index for claim in world.claims for g in claim.groups)
    assert trained == list(range(16)), "each prompt once"


async def test_an_undisturbed_run_and_a_killed_one_make_the_same_samples(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    async def samples(kill: bool) -> list:
        await redis_client.flushall()
        async with open_world(run_file(tmp_path), redis_client) as world:
            if kill:
                world.router.hang = {"e0.1", "e0.2"}
                async with world.rollout():
                    await until(lambda: len(world.router.requests) >= 4, "in mid-production")
                world.router.hang = set()
            async with world.rollout():
                await world.train(range(1, 5))
        groups = sorted((g for c in world.claims for g in c.groups), key=lambda g: GroupId.parse(g.group_id))
        return [(g.group_id, s.token_ids.tobytes(), s.version_spans, s.seed) for g in groups for s in g.samples]

    assert await samples(kill=False) == await samples(kill=True)


async def test_a_full_stream_blocks_production_visibly(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    config = run_file(
        tmp_path,
        rollout={"groups_per_step": 2, "buffer_groups": 3, "max_in_flight": 2, "max_staleness": "unbounded"},
        run={"steps": 8},
    )
    async with open_world(config, redis_client) as world, world.rollout() as service:
        board = service.status.activity  # type: ignore[attr-defined]
        await until(lambda: "room in the stream" in board("production").waiting_for, "blocked")
        account = await world.ledger.account()
        assert account.buffered == 3, "nothing is evicted and nothing is put over the bound"
        assert account.generating <= 2
        await world.train(range(1, 9), max_staleness=None)
        account = await world.ledger.account(recount=True)
    assert (account.trained, account.balanced) == (16, True)


async def test_filters_drop_count_and_replace(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    filters = [{"name": "no_missing"}, {"name": "nonzero_std"}]
    config = run_file(tmp_path, run={"steps": 1}, rollout={"filters": filters})
    async with open_world(config, redis_client) as world:
        world.reward.values = {"e0.0": [1.0, 1.0], "e0.1": [0.0, 0.0], "e0.2": [None, 1.0]}
        async with world.rollout() as service:
            await world.train(range(1, 2))
            await until(lambda: service.status.gauges.get("dropped") == 3, "counted")  # type: ignore[attr-defined]
        account = await world.ledger.account(recount=True)
    assert account.dropped == {"zero_std": 2, "missing_reward": 1}
    assert sorted(g.group_id for g in world.claims[0].groups) == ["e0.3", "e0.4", "e0.5", "e0.6"]


async def test_missing_and_invalid_rewards_stay_missing(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    async with open_world(run_file(tmp_path, run={"steps": 1}), redis_client) as world:
        world.reward.values = {"e0.0": [None, None], "e0.1": [float("nan"), 1.0]}
        async with world.rollout():
            await world.train(range(1, 2))
    groups = {g.group_id: g for g in world.claims[0].groups}
    assert [s.reward_value for s in groups["e0.0"].samples] == [None, None], "kept: no filter was asked for"
    assert [s.reward_value for s in groups["e0.1"].samples] == [None, 1.0]
    assert groups["e0.1"].samples[0].reward.missing.detail == "the reward service sent nan"


async def test_a_reward_service_that_is_away_is_waited_for(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    async with open_world(run_file(tmp_path, run={"steps": 1}), redis_client) as world:
        world.reward.away = 30
        async with world.rollout():
            await world.train(range(1, 2))
    assert all(s.reward_value is not None for g in world.claims[0].groups for s in g.samples)


async def test_one_broken_sample_does_not_cost_its_siblings(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    async with open_world(run_file(tmp_path, run={"steps": 1}, rollout={"max_attempts": 1}), redis_client) as world:
        world.router.broken = {("e0.0", 0), ("e0.1", 0), ("e0.1", 1)}
        world.reward.values["e0.0"] = [1.0]
        async with world.rollout():
            await world.train(range(1, 2))
        (dead,) = await world.ledger.groups("dead")
    group = next(g for g in world.claims[0].groups if g.group_id == "e0.0")
    assert [s.status == FAILED for s in group.samples] == [True, False]
    assert [s.reward_value for s in group.samples] == [None, 1.0]
    assert "sampler_logprobs" in group.samples[0].reward.missing.detail
    assert dead.group_id == "e0.1"
    assert "all 2 samples failed" in dead.detail


async def test_when_every_attempt_fails_the_run_goes_on(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    config = run_file(tmp_path, run={"steps": 1}, rollout={"max_attempts": 2})
    async with open_world(config, redis_client) as world:
        failing = [f"e0.{i}" for i in range(8)]
        world.router.refuse = dict.fromkeys(failing, (grpc.StatusCode.INTERNAL, "boom"))
        async with world.rollout():
            await world.train(range(1, 2))
        dead = await world.ledger.groups("dead")
    assert [item.group_id for item in dead] == failing
    assert {item.detail for item in dead} == {"INTERNAL: boom"}
    assert {item.failures for item in dead} == {2}


async def test_a_request_that_can_never_work_is_not_repeated(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    async with open_world(run_file(tmp_path, run={"steps": 1}), redis_client) as world:
        world.router.refuse = {"e0.2": (grpc.StatusCode.INVALID_ARGUMENT, "17 tokens do not fit")}
        async with world.rollout():
            await world.train(range(1, 2))
        (dead,) = await world.ledger.groups("dead")
    assert dead.detail == "INVALID_ARGUMENT: 17 tokens do not fit"
    assert sum(request.session_id == "e0.2" for request in world.router.requests) == 1


async def test_prompts_that_are_too_long_are_dropped_and_replaced(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, data={"max_prompt_tokens": 2}, run={"steps": 2})
    async with open_world(config, redis_client) as world, world.rollout():
        await world.train(range(1, 3))
        account = await world.ledger.account(recount=True)
    assert {len(r.prompt_token_ids.data) // 4 for r in world.router.requests} == {2}
    assert account.dropped["prompt_too_long"] > 0
    assert (account.trained, account.balanced) == (8, True)


async def test_a_run_that_its_data_cannot_fill_ends_with_the_reason(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, prompts=8, run={"steps": 2}, rollout={"filters": [{"name": "nonzero_std"}]})
    async with open_world(config, redis_client) as world:
        world.reward.values = {"e0.7": [1.0, 1.0]}
        async with world.rollout():
            await world.train(range(1, 2))
            await until(lambda: world.coordinator.finished, "the run is ended")
    assert "7 of the 8 groups of the run are left" in world.coordinator.finished[0].reason
    assert "1 were dropped (zero_std)" in world.coordinator.finished[0].reason
    assert "data.epochs" in world.coordinator.finished[0].reason


async def test_pause_holds_new_prompts_until_resume(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    async with open_world(run_file(tmp_path), redis_client) as world, world.rollout() as service:
        await world.claim(1)
        await world.stream.mark_trained(1)
        await service.servicer.PauseProduction(pb.PauseProductionRequest(reason="maintenance"), CALL)
        await world.publish(1)
        activity = service.status.activity("production")  # type: ignore[attr-defined]
        await until(lambda: activity.waiting_for == "ResumeProduction: paused (maintenance)", "paused")
        assert len(world.router.requests) == 4
        await service.servicer.ResumeProduction(pb.ResumeProductionRequest(), CALL)
        await world.claim(2)


async def test_a_pause_outlives_the_process_and_late_repeats_change_nothing(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    pause = pb.PauseProductionRequest(reason="maintenance", request_id="pause-1")
    async with open_world(run_file(tmp_path), redis_client) as world:
        async with world.rollout() as service:
            await world.claim(1)
            await world.stream.mark_trained(1)
            await service.servicer.PauseProduction(pause, CALL)
        await world.publish(1)
        async with world.rollout() as service:
            activity = service.status.activity("production")  # type: ignore[attr-defined]
            await until(lambda: activity.waiting_for == "ResumeProduction: paused (maintenance)", "paused still")
            assert len(world.router.requests) == 4
            await service.servicer.ResumeProduction(pb.ResumeProductionRequest(request_id="resume-1"), CALL)
            # The client's answer was lost, and it asks again after others have resumed.
            await service.servicer.PauseProduction(pause, CALL)
            await world.claim(2)
        await world.stream.mark_trained(2)
        await world.publish(2)
        async with world.rollout():
            await world.claim(3)


async def test_a_version_that_engines_left_is_not_the_prompts_fault(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    async with open_world(run_file(tmp_path, run={"steps": 1}, rollout={"max_attempts": 1}), redis_client) as world:
        world.router.served = 9
        async with world.rollout():
            await until(lambda: len(world.router.requests) >= 8, "refused and issued again")
            world.router.served = 1
            await world.train(range(1, 2))
        assert (await world.ledger.account(recount=True)).dead == 0


async def test_a_lease_that_ran_out_lets_another_producer_take_over(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, run={"steps": 1}, rollout={"lease_seconds": 0.6})
    async with open_world(config, redis_client) as world:
        world.router.open.clear()
        async with world.rollout("rollout-0"):
            await until(lambda: len(world.router.requests) >= 4, "in mid-production")
        world.router.open.set()
        async with world.rollout("rollout-1"):
            await world.train(range(1, 2))
        events = await world.ledger.history("e0.0")
    assert any("lease of rollout-0 ran out" in event.detail for event in events)


async def test_an_attempt_that_is_given_up_ends_in_the_engine_as_well(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, run={"steps": 1}, rollout={"group_deadline_seconds": 1.0, "max_attempts": 1})
    async with open_world(config, redis_client) as world:
        world.router.hang = {"e0.0"}
        async with world.rollout():
            await world.train(range(1, 2))
            await until(lambda: world.router.cancelled == ["e0.0"], "the deadline reaches the router")
        world.router.hang = {"e0.1"}
    async with open_world(run_file(tmp_path, run={"name": "second"}), redis_client) as world:
        world.router.hang = {"e0.1"}
        async with world.rollout():
            await until(lambda: len(world.router.requests) == 4, "in flight")
        await until(lambda: world.router.cancelled == ["e0.1"], "a stop reaches the router")


async def test_a_request_that_an_earlier_life_left_behind_is_ended(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    async with open_world(run_file(tmp_path, run={"steps": 1}), redis_client) as world:
        world.router.refuse = {"e0.0": (grpc.StatusCode.ALREADY_EXISTS, "e0.0#1 is running")}
        async with world.rollout():
            await until(lambda: "e0.0#1" in world.router.aborted, "aborted")
            world.router.refuse = {}
            await world.train(range(1, 2))


async def test_every_group_is_one_trace_from_issue_to_put(tmp_path: Path, redis_client: redis.asyncio.Redis) -> None:
    exporter = InMemorySpanExporter()
    tracing.add_processor(SimpleSpanProcessor(exporter))
    async with open_world(run_file(tmp_path, run={"steps": 1}), redis_client) as world, world.rollout() as service:
        await world.train(range(1, 2))
        await until(lambda: service.production.num_in_flight == 0, "spans ended")
    spans = exporter.get_finished_spans()
    for group in world.claims[0].groups:
        own = [span for span in spans if f"{span.context.trace_id:032x}" == tracing.trace_id(group.traceparent)]
        (root,) = [span for span in own if span.name == names.SPAN_ROLLOUT_GROUP]
        assert root.parent is None
        assert root.attributes[names.ATTRIBUTE_GROUP_ID] == group.group_id
        children = {span.name for span in own if span.parent and span.parent.span_id == root.context.span_id}
        assert children >= {names.SPAN_ROLLOUT_GENERATE, names.SPAN_ROLLOUT_SCORE, names.SPAN_ROLLOUT_PUT}


async def test_a_first_step_without_any_reward_shows_a_sample(
    tmp_path: Path, redis_client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_world(run_file(tmp_path, run={"steps": 1}), redis_client) as world:
        world.reward.values = {f"e0.{i}": [0.0, 0.0] for i in range(4)}
        async with world.rollout():
            await world.train(range(1, 2))
    (warning,) = [record.getMessage() for record in caplog.records if "nothing to learn" in record.getMessage()]
    assert "prompt 'p" in warning
    assert '"label"' in warning


async def test_a_reward_service_that_is_away_for_longer_than_a_deadline_kills_no_prompt(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, run={"steps": 1}, rollout={"group_deadline_seconds": 0.6, "max_attempts": 1})
    async with open_world(config, redis_client) as world:
        world.reward.gone = True
        async with world.rollout():
            await until(lambda: len(world.router.requests) >= 8, "attempts failed and were issued again")
            world.reward.gone = False
            await world.train(range(1, 2))
        account = await world.ledger.account(recount=True)
    assert (account.dead, account.balanced) == (0, True)
    assert all(s.reward_value is not None for g in world.claims[0].groups for s in g.samples)


async def test_a_prompt_that_breaks_healthy_engines_is_dead_in_the_end(
    tmp_path: Path, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, run={"steps": 1}, rollout={"group_deadline_seconds": 2.0, "max_attempts": 2})
    async with open_world(config, redis_client) as world:
        world.router.refuse = {"e0.0": (grpc.StatusCode.UNAVAILABLE, "4 engines failed it")}
        async with world.rollout():
            await world.train(range(1, 2))
        (dead,) = await world.ledger.groups("dead")
    assert (dead.group_id, dead.failures) == ("e0.0", 2)
    assert "4 engines failed it" in dead.detail
