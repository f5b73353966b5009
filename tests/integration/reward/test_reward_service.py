"""The reward service as a process, over gRPC."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil
import pytest
import pytest_asyncio

from paceline.api.common.v1 import reward_pb2, status_service_pb2, status_service_pb2_grpc
from paceline.api.reward.v1 import reward_service_pb2 as pb
from paceline.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from paceline.rpc.client import open_channel

pytestmark = pytest.mark.asyncio(loop_scope="module")

REWARDS = """
import time
from paceline.environment import reward

@reward(name="care")
def careful(response, metadata):
    if metadata.get("spin"):
        while True: pass
    if metadata.get("fail"):
        raise ValueError("no good")
    return 0.5

@reward
async def length(response, prompt):
    return len(prompt) + len(response)

def slow():
    time.sleep(600)
"""
RUN = """
[run]
name = "grading"
[model]
path = "none"
[data.source]
name = "jsonl"
path = "none"
[reward]
timeout_seconds = 20
max_waiting = 31
[[reward.graders]]
name = "my_rewards:careful"
"""


@dataclass
class Service:
    process: asyncio.subprocess.Process
    channel: grpc.aio.Channel

    async def score(
        self, graders: list[Any], metadata: list[dict[str, Any]], timeout: float = 60.0, **more: Any
    ) -> Any:
        request = pb.ScoreRequest(
            run_id="grading",
            group_id="e0.0",
            graders=[pb.GraderSpec(name=name, options_json=json.dumps(o), weight=w) for name, o, w in graders],
            items=[
                pb.ScoreItem(
                    sample_id=f"e0.0/{i}", prompt_text="?", response_text="abc", metadata_json=json.dumps(item)
                )
                for i, item in enumerate(metadata)
            ],
            **more,
        )
        return (await pb_grpc.RewardServiceStub(self.channel).Score(request, timeout=timeout)).rewards

    async def status(self) -> status_service_pb2.GetStatusResponse:
        stub = status_service_pb2_grpc.StatusServiceStub(self.channel)
        return await stub.GetStatus(status_service_pb2.GetStatusRequest(), timeout=10)

    async def until(self, condition: Callable[[Mapping[str, float]], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition((await self.status()).gauges):  # noqa: ASYNC110 - another process is watched
                await asyncio.sleep(0.02)

    async def pids(self) -> set[int]:
        return {int(pid) for pid in (await self.status()).facts["worker_pids"].split()}


async def start(folder: Path, run: str) -> tuple[asyncio.subprocess.Process, str]:
    (folder / "run.toml").write_text(run)
    (folder / "my_rewards.py").write_text(REWARDS)
    read, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.reward", "run.toml", "--coordinator-addr", "127.0.0.1:1", cwd=folder,
        pass_fds=[write], env={**os.environ, "PACELINE_READY_FD": str(write)}, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    os.close(write)
    with os.fdopen(read) as pipe:
        line = await asyncio.wait_for(asyncio.to_thread(pipe.readline), 60)
    return process, json.loads(line)["address"] if line else ""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def service(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Service]:
    process, address = await start(tmp_path_factory.mktemp("service"), RUN)
    assert address
    channel = open_channel(address)
    yield Service(process, channel)
    await channel.close()
    process.terminate()
    assert await asyncio.wait_for(process.wait(), 20) == 0


CARE = ("my_rewards:careful", {}, 1.0)


async def test_one_spinning_sample_of_eight_is_missing_and_the_others_have_values(service: Service) -> None:
    before = await service.pids()
    loop = asyncio.get_running_loop()
    began = loop.time()
    rewards = await service.score([CARE], [{"spin": index == 3} for index in range(8)], timeout_seconds=1.0)
    assert loop.time() - began < 3
    assert rewards[3].WhichOneof("outcome") == "missing"
    assert rewards[3].missing.reason == reward_pb2.MISSING_REASON_TIMEOUT
    assert rewards[3].missing.detail == "care: ran past 1.0 s"
    assert [reward.value for index, reward in enumerate(rewards) if index != 3] == [0.5] * 7
    status = await service.status()
    assert status.gauges["timeouts"] == 1 and status.gauges["busy"] == 0
    assert await service.pids() != before


async def test_a_reward_is_the_weighted_sum_and_names_its_components(service: Service) -> None:
    graders = [CARE, ("my_rewards:length", {}, 2.0), ("exact_match", {}, 0.0), ("exact_match", {"strip": False}, -1.0)]
    good, bad = await service.score(graders, [{"label": "abc"}, {"label": "abc", "fail": True}])
    assert good.value == 0.5 + 2 * 4 + 0 - 1
    assert [(item.name, item.weight, item.value) for item in good.components] == [
        ("care", 1, 0.5), ("length", 2, 4), ("exact_match", 0, 1), ("exact_match.2", -1, 1),
    ]  # fmt: skip
    assert bad.missing.reason == reward_pb2.MISSING_REASON_GRADER_ERROR
    assert bad.missing.detail.startswith("care: ValueError: no good (my_rewards.py:")
    assert [item.WhichOneof("outcome") for item in bad.components] == ["missing", "value", "value", "value"]


async def test_what_cannot_be_graded_before_the_deadline_is_missing_and_the_rest_arrives(service: Service) -> None:
    rewards = await service.score([CARE], [{}, {"spin": True}, {"spin": True}], timeout=4.0)
    assert rewards[0].value == 0.5
    assert [reward.missing.reason for reward in rewards[1:]] == [reward_pb2.MISSING_REASON_NOT_GRADED] * 2


@pytest.mark.parametrize(
    ("graders", "metadata", "message"),
    [
        ([("exact_mach", {}, 1.0)], [{}], "did you mean 'exact_match'"),
        (
            [("exact_match", {"labl": 1}, 1.0)],
            [{}],
            "unknown key 'graders[0].labl'; known here: first_line, ignore_case, label_field",
        ),
        ([("exact_match", {}, 1.0)], [{"answer": 1}], "needs metadata field 'label', which sample 'e0.0/0' lacks"),
        ([CARE, ("exact_match", {}, float("nan"))], [{}], "graders[1]: weight = nan"),
        ([("my_rewards:careful", {}, 0.0)], [{}], "every grader has weight 0"),
        ([], [{}], "name at least one grader"),
        ([CARE], [{}] * 33, "raise reward.max_waiting"),
    ],
)
async def test_a_wrong_request_is_refused_with_the_fix(
    service: Service, graders: list[Any], metadata: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.score(graders, metadata)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert message in (refused.value.details() or "")


async def test_a_full_queue_refuses_and_a_cancelled_call_frees_it(service: Service) -> None:
    running = asyncio.create_task(service.score([CARE], [{"spin": True}] * 32))
    await service.until(lambda gauges: gauges["queued"] == 31)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await service.score([CARE], [{}])
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "paceline-retry-delay-seconds" in dict(refused.value.trailing_metadata() or ())
    running.cancel()
    await service.until(lambda gauges: gauges["busy"] == 0)
    assert (await service.score([CARE], [{}]))[0].value == 0.5


async def test_graders_are_listed(service: Service) -> None:
    response = await pb_grpc.RewardServiceStub(service.channel).ListGraders(pb.ListGradersRequest(), timeout=10)
    assert list(response.names) == ["exact_match", "math", "my_rewards:careful", "reasoning_gym", "regex"]


async def test_no_worker_outlives_a_killed_service(tmp_path: Path) -> None:
    process, address = await start(tmp_path, RUN)
    channel = open_channel(address)
    service = Service(process, channel)
    spinning = asyncio.create_task(service.score([CARE], [{"spin": True}]))
    await service.until(lambda gauges: gauges["busy"] == 1)
    workers = [psutil.Process(pid) for pid in await service.pids()]
    assert len(workers) == 2
    process.send_signal(signal.SIGKILL)
    await process.wait()
    spinning.cancel()
    await asyncio.gather(spinning, return_exceptions=True)
    await channel.close()
    _, alive = await asyncio.to_thread(psutil.wait_procs, workers, 10)
    assert alive == []


async def test_a_run_file_with_an_unknown_grader_ends_the_service_with_code_2(tmp_path: Path) -> None:
    process, address = await start(tmp_path, RUN.replace("my_rewards:careful", "maths"))
    assert process.stderr is not None
    text = (await asyncio.wait_for(process.stderr.read(), 60)).decode()
    assert await process.wait() == 2
    assert address == ""
    assert "reward.graders.0: unknown grader 'maths'; did you mean 'math'?" in text
