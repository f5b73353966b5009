"""From a task to graded samples within its deadline; parts that are away are waited for while time is left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from paceline.rpc import errors
from paceline.rpc.patience import PAUSE_SECONDS
from paceline.samples import ABORTED, FAILED, Sample
from paceline.telemetry import names, tracing
from services.rollout.board import GroupBoard
from services.rollout.episodes.base import Episode, GroupTask
from services.rollout.generation import GenerationClient
from services.rollout.grading import GradingClient

T = TypeVar("T")

GENERATING = "generating"
GRADING = "grading"
_GRACE_SECONDS = 0.5
"""A call's own deadline comes first, because its error says more."""


class Producer:
    """Runs episodes and grades them: one way for training and for evaluation."""

    def __init__(self, episode: Episode, generation: GenerationClient, grading: GradingClient) -> None:
        self._episode = episode
        self._generation = generation
        self._grading = grading

    async def produce(self, task: GroupTask, board: GroupBoard) -> list[Sample]:
        """Samples with rewards. DeadlineExceeded says in which stage time ran out; other PacelineErrors and Refused
        come as they were raised, and PacelineError when not one sample can be used."""
        try:
            async with asyncio.timeout(task.deadline.left + _GRACE_SECONDS):
                board.stage(task.group_id, GENERATING)
                with tracing.span(names.SPAN_ROLLOUT_GENERATE, {names.ATTRIBUTE_GROUP_ID: task.group_id}):
                    samples = await self._patiently(task, board, "the router", lambda: self._episode.run(task))
                if all(sample.status in (ABORTED, FAILED) for sample in samples):
                    raise errors.PacelineError(f"all {len(samples)} samples failed: {_fault(samples)}")
                board.stage(task.group_id, GRADING)
                with tracing.span(names.SPAN_ROLLOUT_SCORE, {names.ATTRIBUTE_GROUP_ID: task.group_id}):
                    await self._patiently(task, board, "the reward service", lambda: self._score(task, samples))
        except (TimeoutError, errors.DeadlineExceeded) as error:
            said = f": {error}" if isinstance(error, errors.DeadlineExceeded) else ""
            raise errors.DeadlineExceeded(
                f"{task.group_id} was not finished after {task.deadline.seconds:g} s "
                f"({board.stage_of(task.group_id)}){said}"
            ) from error
        return samples

    async def blames(self, error: errors.PacelineError, task: GroupTask, board: GroupBoard) -> bool:
        """Whether a failed attempt speaks against its prompt, rather than against a part of the system that was away.

        Asks the part: one that could have served while this prompt failed was not away.
        """
        if isinstance(error, errors.ResourceExhausted | errors.FailedPrecondition | errors.Aborted):
            return False
        if isinstance(error, errors.Unavailable | errors.DeadlineExceeded):
            if board.stage_of(task.group_id).startswith(GRADING):
                return await self._grading.answers()
            return await self._generation.could_serve(task.gate)
        return True

    async def _score(self, task: GroupTask, samples: list[Sample]) -> None:
        await self._grading.score(task.group_id, task.prompt, samples, task.deadline.left)

    async def _patiently(self, task: GroupTask, board: GroupBoard, who: str, call: Callable[[], Awaitable[T]]) -> T:
        """Repeat a call while its failure is one that waiting can mend and time is left."""
        while True:
            try:
                return await call()
            except (errors.Unavailable, errors.ResourceExhausted, errors.AlreadyExists) as error:
                pause = error.retry_delay or PAUSE_SECONDS
                if task.deadline.left <= pause:
                    raise
                with board.waiting(task.group_id, f"{who}: {error.message}"):
                    if isinstance(error, errors.AlreadyExists):
                        await self._clear(task)
                    await asyncio.sleep(pause)

    async def _clear(self, task: GroupTask) -> None:
        """An earlier life of this process left the request behind."""
        try:
            await self._generation.abort(task.request_id)
        except (errors.Unavailable, errors.DeadlineExceeded):
            return  # The next try meets the same condition and says so.


def _fault(samples: list[Sample]) -> str:
    if any(sample.status == FAILED for sample in samples):
        return next(sample.reward.missing.detail for sample in samples if sample.status == FAILED)
    return "they were aborted"
