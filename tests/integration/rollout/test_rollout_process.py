"""The real process: killed with SIGKILL in mid-production, stopped in order, and refused a wrong configuration."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis.asyncio
from rollout_world import World, open_world, run_file, until

from paceline.config import RunFile
from paceline.testing.processes import ServiceFailed, service_process


def written(config: RunFile, folder: Path) -> Path:
    """The resolved configuration as a file."""
    path = folder / "config.json"
    path.write_text(config.model_dump_json())
    return path


def places(world: World) -> list[str]:
    return ["--router-addr", world.addresses["router"], "--reward-addr", world.addresses["reward"]]


async def test_sigkill_in_mid_production_loses_nothing(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path, run={"steps": 3})
    async with open_world(config, redis_client) as world:
        world.router.hang = {"e0.2", "e0.3"}
        process = service_process(
            "rollout", written(config, tmp_path), *places(world), redis_url=redis_url,
            coordinator=world.addresses["coordinator"],
        )  # fmt: skip
        async with process as (rollout, _):
            await until(lambda: len(world.router.requests) == 4, "step 1 is being made")
            await rollout.kill()
            assert (await world.ledger.account(recount=True)).balanced
            world.router.hang = set()
            await rollout.start()
            await world.train(range(1, 3))
            await until(lambda: len(world.router.requests) >= 14, "step 3 is being made")
            await rollout.restart()
            await world.train(range(3, 4))
            assert await rollout.stop() == 0
        account = await world.ledger.account(recount=True)
    assert (account.trained, account.issued, account.balanced) == (12, 12, True)
    ids = sorted(group.group_id for claim in world.claims for group in claim.groups)
    assert ids == sorted(f"e0.{i}" for i in range(12))


async def test_an_orderly_stop_gives_groups_back_at_once(
    tmp_path: Path, redis_url: str, redis_client: redis.asyncio.Redis
) -> None:
    config = run_file(tmp_path)
    async with open_world(config, redis_client) as world:
        world.router.open.clear()
        process = service_process(
            "rollout", written(config, tmp_path), *places(world), redis_url=redis_url,
            coordinator=world.addresses["coordinator"],
        )  # fmt: skip
        async with process as (rollout, _):
            await until(lambda: len(world.router.requests) == 4, "in mid-production")
            assert await rollout.stop() == 0
        assert len(await world.ledger.groups("waiting")) == 4


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=40", "the run needs 160 groups"),
        ("data.source.path=/no/such.jsonl", "data file /no/such.jsonl does not exist"),
        ("data.chat_template=true", "has no chat template"),
        ("rollout.episode.name=two_turns", "unknown episode 'two_turns'"),
        ("model.path=/no/such/model", "tokenizer.json is missing"),
    ],
)
async def test_a_wrong_configuration_ends_the_start_with_code_2(
    tmp_path: Path, redis_url: str, override: str, message: str
) -> None:
    process = service_process(
        "rollout", written(run_file(tmp_path), tmp_path), "--router-addr", "127.0.0.1:1", "--reward-addr",
        "127.0.0.1:1", overrides=[override], redis_url=redis_url, coordinator="127.0.0.1:1",
    )  # fmt: skip
    with pytest.raises(ServiceFailed, match="did not serve") as failure:
        async with process:
            pass
    assert message in str(failure.value)
