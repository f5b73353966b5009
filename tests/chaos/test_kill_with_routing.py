"""A model with experts, its routing replayed, through all services, and rollout killed: no blob is lost or left."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import redis.asyncio
import torch
import transformers

from paceline.cli.observe import Observer
from paceline.config import RunFile, load_run_file
from paceline.launcher.launcher import Launcher
from paceline.ledger import Account, Ledger

STEPS = 9
HEAD: dict[str, Any] = {"head_dim": 16}
SORT4 = Path("tests/assets/sort4")


def make_model(folder: Path) -> Path:
    """Qwen3-MoE with random weights over the characters of sort4."""
    torch.manual_seed(1)
    words = json.loads((SORT4 / "config.json").read_text())
    config = transformers.Qwen3MoeConfig(
        vocab_size=words["vocab_size"], hidden_size=32, intermediate_size=64, num_hidden_layers=3,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=256, num_experts=8,
        num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True, mlp_only_layers=[0],
        tie_word_embeddings=True, initializer_range=0.1, bos_token_id=0, eos_token_id=0, pad_token_id=0, **HEAD,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(SORT4 / name, folder)
    return folder


def configuration(directory: Path, model: Path) -> RunFile:
    overrides = [
        f"run.steps={STEPS}", f"run.directory={directory}", f"model.path={model}", "evaluation=[]",
        "rollout.groups_per_step=4", "rollout.samples_per_group=4", "rollout.lease_seconds=5",
        "trainer.checkpoint_every=3", "engine.record_routing=true",
        "trainer.routing_replay=true", 'reward.graders=[{name="regex", pattern="[a-m]{2}"}]',
    ]  # fmt: skip
    return load_run_file(Path("examples/sort4/run.toml"), overrides)


async def kill_rollout(launcher: Launcher, blobs: Path, news: asyncio.Queue[str]) -> list[str]:
    """Kill it while there are blobs; whose they are."""
    while True:
        owners = names_in(blobs)
        if owners:
            break
        await asyncio.sleep(0.005)
    pid = launcher.children["rollout-0"].pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    while await news.get() != "rollout-0 is back":
        pass
    return owners


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


async def complete(config: RunFile) -> tuple[Account, dict[int, dict[str, float]], list[str], Launcher]:
    config.directory.mkdir(parents=True)
    news: asyncio.Queue[str] = asyncio.Queue()
    launcher = Launcher(config, news.put_nowait)
    try:
        await launcher.start()
        observer = Observer(launcher.addresses["coordinator-0"], config.run.name)
        killer = asyncio.create_task(kill_rollout(launcher, config.directory / "blobs", news))
        async with asyncio.timeout(200):
            assert await launcher.watch(), launcher.failure
            owners = await killer
            async for _ in observer.follow_steps():
                pass
        records = {step: dict(record.values) for step, record in observer.view.records.items()}
        await observer.close()
        client = redis.asyncio.Redis.from_url(launcher.redis_url)
        account = await Ledger(client, config.run.name).account(recount=True)
        await client.aclose()
        return account, records, owners, launcher
    finally:
        await launcher.stop()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_routing_replay_through_all_services_with_rollout_killed(tmp_path: Path) -> None:
    config = configuration(tmp_path / "run", make_model(tmp_path / "model"))
    account, records, owners, launcher = asyncio.run(complete(config))

    assert {name: child.restarts for name, child in launcher.children.items() if child.restarts} == {"rollout-0": 1}
    assert account.balanced and account.trained == account.committed == STEPS * 4
    assert (account.dead, account.in_flight) == (0, 0)
    assert owners
    assert names_in(config.directory / "blobs") == []
    assert sorted(records) == list(range(1, STEPS + 1))
    for values in records.values():
        assert values["logprob_gap_max"] < 1e-3
        assert 0 <= values["routing_disagreement"] < 0.5
