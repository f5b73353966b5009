"""Rewards of a group from the reward service. What was not graded is missing, with the reason; never zero."""

from __future__ import annotations

import json
import math

import grpc.aio

from paceline.api.common.v1 import reward_pb2
from paceline.api.reward.v1 import reward_service_pb2 as pb
from paceline.api.reward.v1 import reward_service_pb2_grpc as pb_grpc
from paceline.config.services import GraderTable
from paceline.rpc import errors
from paceline.samples import COMPLETED, TRUNCATED, Sample
from services.rollout.sources.base import Prompt

ANSWER_SECONDS = 5.0
_GRADED = (COMPLETED, TRUNCATED)


def missing(reason: reward_pb2.MissingReason.ValueType, detail: str) -> reward_pb2.Reward:
    """A reward that is not there."""
    return reward_pb2.Reward(missing=reward_pb2.MissingReward(reason=reason, detail=detail))


class GradingClient:
    """Asks the reward service to grade, by the graders of the run file."""

    def __init__(self, stub: pb_grpc.RewardServiceAsyncStub, run_id: str, graders: list[GraderTable]) -> None:
        self._stub = stub
        self._run_id = run_id
        self._graders = [
            pb.GraderSpec(name=grader.name, options_json=json.dumps(grader.options()), weight=grader.weight)
            for grader in graders
        ]

    async def score(self, group_id: str, prompt: Prompt, samples: list[Sample], timeout: float) -> None:
        """Give every sample its reward. Samples that did not end by themselves are not sent: their reward is missing.

        PacelineError of the service as it is; DeadlineExceeded after `timeout` seconds.
        """
        graded = [sample for sample in samples if sample.status in _GRADED]
        for sample in samples:
            if sample.status not in _GRADED and sample.reward.WhichOneof("outcome") is None:
                sample.reward = missing(reward_pb2.MISSING_REASON_NOT_GRADED, "the sample failed or was aborted")
        if not graded:
            return
        metadata = json.dumps(prompt.metadata, default=str)
        request = pb.ScoreRequest(run_id=self._run_id, group_id=group_id, graders=self._graders)
        for sample in graded:
            request.items.add(
                sample_id=sample.sample_id, prompt_text=prompt.shown, response_text=sample.text, metadata_json=metadata
            )
        try:
            response = await self._stub.Score(request, timeout=timeout)
        except grpc.aio.AioRpcError as error:
            raise errors.from_rpc(error) from error
        if len(response.rewards) != len(graded):
            raise errors.PacelineError(
                f"group {group_id}: the reward service answered {len(response.rewards)} of {len(graded)} samples"
            )
        for sample, reward in zip(graded, response.rewards, strict=True):
            sample.reward = checked(reward)

    async def answers(self) -> bool:
        """Whether the service answers now."""
        try:
            await self._stub.ListGraders(pb.ListGradersRequest(), timeout=ANSWER_SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return True


def checked(reward: reward_pb2.Reward) -> reward_pb2.Reward:
    """The reward itself when it is a finite number or missing; else a missing one that says what came."""
    outcome = reward.WhichOneof("outcome")
    if outcome is None:
        return missing(reward_pb2.MISSING_REASON_INVALID, "the reward service sent neither a value nor a reason")
    if outcome == "value" and not math.isfinite(reward.value):
        return missing(reward_pb2.MISSING_REASON_INVALID, f"the reward service sent {reward.value}")
    return reward
