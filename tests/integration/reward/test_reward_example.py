"""examples/custom_reward: its run file parses, and its function grades in the real service."""

from __future__ import annotations

from pathlib import Path

import pytest

from paceline.api.reward.v1 import reward_service_pb2 as pb
from paceline.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from paceline.config import load_run_file
from paceline.rpc.client import open_channel
from paceline.testing.processes import ServiceProcess

ROOT = Path(__file__).resolve().parents[3]


async def test_the_example_is_graded_by_its_own_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    run_file = ROOT / "examples/custom_reward/run.toml"
    config = load_run_file(run_file)
    service = ServiceProcess("reward", run_file, ["--coordinator-addr", "127.0.0.1:1"], [], {})
    channel = open_channel(await service.start())
    try:
        request = pb.ScoreRequest(
            run_id=config.run.name,
            group_id="e0.0",
            graders=[pb.GraderSpec(name=table.name, weight=table.weight) for table in config.reward.graders],
            items=[
                pb.ScoreItem(sample_id=f"e0.0/{index}", prompt_text="cadb=", response_text=text)
                for index, text in enumerate(["abcd\n", "abdc\n", "", "dcba and more"])
            ],
        )
        rewards = (await pb_grpc.RewardServiceStub(channel).Score(request, timeout=30)).rewards
    finally:
        await channel.close()
        await service.stop()
    assert [reward.value for reward in rewards] == [1.0, 0.5, 0.0, 0.0]
    assert rewards[0].components[0].name == "sortedness"
