"""A stand-in for rollout: follows weight versions and puts groups that depend on nothing but their id and version."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import redis.asyncio

from paceline.api.common.v1 import reward_pb2
from paceline.ledger import Ledger
from paceline.rpc import errors
from paceline.rpc.status import Activity
from paceline.samples import COMPLETED, Sample, SampleGroup
from paceline.stream import SampleStream
from paceline.weights.watch import VersionWatch

MISSING = reward_pb2.Reward(missing=reward_pb2.MissingReward(reason=reward_pb2.MISSING_REASON_TIMEOUT))
SAMPLES, PROMPT, COMPLETION = 4, 6, 4


def scripted_group(run_id: str, group_id: str, attempt: int, version: int, rewards: list[float | None]) -> SampleGroup:
    """Random tokens drawn from the group's id; one sample for each reward, None for a missing one."""
    random = np.random.default_rng(list(group_id.encode()))
    prompt = random.integers(1, 50, PROMPT)
    samples = []
    for sibling, reward in enumerate(rewards):
        mask = np.concatenate([np.zeros(PROMPT, np.uint8), np.ones(COMPLETION, np.uint8)])
        ids = np.concatenate([prompt, random.integers(1, 50, COMPLETION)]).astype(np.int32)
        name = f"{group_id}/{sibling}"
        sample = Sample(
            sample_id=name, trajectory_id=name, token_ids=ids, loss_mask=mask,
            sampler_logprobs=(-4.0 * mask).astype(np.float32), version_spans=[(version, COMPLETION)],
            status=COMPLETED, temperature=1.0, reward=MISSING if reward is None else reward_pb2.Reward(value=reward),
        )  # fmt: skip
        samples.append(sample)
    return SampleGroup(run_id, group_id, attempt, samples)


class ScriptedRollout:
    """Produces `per_step` groups for every published step, as synchronous rollout does."""

    def __init__(self, client: redis.asyncio.Redis, stub: Any, run_id: str, per_step: int, steps: int) -> None:
        self._client = client
        self._watch = VersionWatch(stub, run_id, Activity("watch"))
        self._run_id = run_id
        self._per_step = per_step
        self._steps = steps
        self.rewards: dict[int, list[float | None]] = {}
        """Rewards of every group made for a step, where not random."""
        self.versions: list[tuple[int, int]] = []
        """(weight_version, step) as seen."""

    async def run(self) -> None:
        """Follow versions and produce, for ever; begin anew, as its launcher would, when the ledger is replaced."""
        while True:
            try:
                await self._run()
            except* errors.FailedPrecondition:
                await asyncio.sleep(0)

    async def _run(self) -> None:
        self._ledger = Ledger(self._client, self._run_id)
        self._stream = SampleStream(self._client, self._run_id, capacity=64)
        await self._ledger.initialise(1000, 1)
        await self._ledger.release("rollout-0")
        newest: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

        async def follow() -> None:
            async for version in self._watch.follow(0):
                self.versions.append((version.weight_version, version.step))
                newest.put_nowait((version.weight_version, version.step))

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(follow())
            while True:
                version, step = await newest.get()
                if step < self._steps:
                    await self._produce(version, step)

    async def _produce(self, version: int, step: int) -> None:
        ceiling = (step + 1) * self._per_step
        for issue in await self._ledger.issue("rollout-0", self._per_step, 60.0, ceiling):
            random = np.random.default_rng(list(issue.group_id.encode()))
            rewards = self.rewards.get(step, [float(item) for item in random.integers(0, 2, SAMPLES)])
            group = scripted_group(self._run_id, issue.group_id, issue.attempt, version, rewards)
            try:
                await self._stream.put(group)
            except errors.ResourceExhausted as error:
                raise AssertionError("the stream must have room for a step") from error
