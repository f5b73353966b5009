"""Puts the rollout service together from a run file and its collaborators."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from paceline.api.coordinator.v1 import coordinator_service_pb2 as coordinator_pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.api.reward.v1 import reward_service_pb2_grpc as reward_grpc
from paceline.api.router.v1 import router_service_pb2_grpc as router_grpc
from paceline.api.weights.v1.weights_pb2 import WeightVersion
from paceline.bell import Bell
from paceline.blobs import BlobKeeper
from paceline.config import RunFile, make_plugin
from paceline.ledger import Ledger
from paceline.prompts.opening import check_template, open_evaluation, open_training
from paceline.rpc.patience import until_available
from paceline.rpc.status import StatusBoard
from paceline.stream import SampleStream
from paceline.tokenizer import Tokenizer
from services.rollout.attempt import Attempts
from services.rollout.board import GroupBoard
from services.rollout.datasets import Dataset
from services.rollout.episodes.base import Episode, EpisodeContext
from services.rollout.evaluation import Evaluation, Evaluator
from services.rollout.evaluation_store import EvaluationStore
from services.rollout.filters.base import Filter
from services.rollout.generation import GenerationClient
from services.rollout.given import UNBOUNDED, GivenProducer, NoEngines, NoVersions
from services.rollout.grading import GradingClient
from services.rollout.hold import Hold
from services.rollout.pause_store import PauseStore
from services.rollout.producer import Producer
from services.rollout.production import Production
from services.rollout.server import RolloutServer
from services.rollout.versions import NewestVersion

log = logging.getLogger(__name__)

FINISH_SECONDS = 10.0


@dataclass
class Collaborators:
    """What the service talks to. A run whose samples are given has neither router nor reward."""

    redis: Any
    coordinator: coordinator_grpc.CoordinatorServiceAsyncStub
    router: router_grpc.RouterServiceAsyncStub | None = None
    reward: reward_grpc.RewardServiceAsyncStub | None = None


@dataclass(frozen=True)
class Data:
    """What is read from files before anything is produced."""

    tokenizer: Tokenizer
    dataset: Dataset
    evaluations: list[Evaluation]

    @classmethod
    def load(cls, config: RunFile) -> Data:
        """Read tokenizer and sources. ConfigError for whatever is missing or too little, before the run starts."""
        tokenizer = Tokenizer.load(config.model.path)
        check_template(config, tokenizer)
        source = open_training(config)
        if source.malformed:
            log.warning("%d malformed records were skipped (data.max_malformed)", source.malformed)
        evaluations = [
            Evaluation(item, open_evaluation(config, number)) for number, item in enumerate(config.evaluation)
        ]
        return cls(tokenizer, Dataset(source, config.data, config.run.seed), evaluations)


class RolloutService:
    """The whole service without its process: production, evaluation and the gRPC servicer."""

    def __init__(self, config: RunFile, owner: str, data: Data, others: Collaborators, status: StatusBoard) -> None:
        self._config = config
        self._data = data
        self._status = status
        self._coordinator = others.coordinator
        run_id = config.run.name
        self._bell = Bell()
        hold = Hold(self._bell)
        self._ledger = Ledger(others.redis, run_id)
        router, reward = others.router, others.reward
        # Given groups have a place in the stream before they are issued (admission), and are never refused one.
        stream = SampleStream(others.redis, run_id, config.rollout.buffer_groups if router else UNBOUNDED)
        generation = GenerationClient(router, run_id) if router else NoEngines(config)
        context = EpisodeContext(config, data.tokenizer, generation)
        episode: Episode = make_plugin("episode", config.rollout.episode, "rollout.episode", context)
        filters: list[Filter] = [
            make_plugin("filter", table, f"rollout.filters.{number}")
            for number, table in enumerate(config.rollout.filters)
        ]
        board = GroupBoard(status.activity("groups"))
        store = EvaluationStore(others.redis, run_id)
        self.evaluator: Evaluator | None = None
        if reward is None:
            self.versions = NoVersions()
            producer = GivenProducer(episode)
        else:
            self.versions = NewestVersion(self._bell, status)
            producer = Producer(episode, generation, GradingClient(reward, run_id, config.reward.graders))
            self.evaluator = Evaluator(
                config, data.evaluations, producer, store, others.coordinator, status, self.versions
            )
        self._producer = producer
        blobs: BlobKeeper | None = None
        if config.trainer.routing_replay:
            store_of_blobs = make_plugin("blob_store", config.rollout.blobs, "rollout.blobs", config.directory, run_id)
            blobs = BlobKeeper(store_of_blobs, self._ledger)
        attempts = Attempts(config, data.dataset, producer, filters, board, blobs)
        self.production = Production(
            config, owner, self._ledger, stream, attempts, board, status, self.versions, self._bell, hold,
            before_issue=self.evaluator.run_due if self.evaluator else _nothing_due, starved=self._end_run,
            blobs=blobs,
        )  # fmt: skip
        self._pauses = PauseStore(others.redis, run_id, owner, hold)
        self.servicer = RolloutServer(self.production, self.evaluator, store, hold, self._pauses)

    async def run(self, versions: AsyncIterator[WeightVersion]) -> None:
        """Produce for ever, following the weight versions of a watch."""
        activity = self._status.activity("production")
        size, epochs = len(self._data.dataset), self._data.dataset.epochs
        await until_available(lambda: self._ledger.initialise(size, epochs), "Redis", activity.waiting)
        await until_available(self._pauses.restore, "Redis", activity.waiting)
        self._status.facts["data"] = f"{size} prompts x {epochs} epochs"
        async with asyncio.TaskGroup() as tasks:
            if isinstance(self.versions, NewestVersion):
                tasks.create_task(self.versions.follow(versions), name="versions")
            tasks.create_task(self.production.run(), name="production")

    async def check(self) -> None:
        """ConfigError when the first given example shows that the run file does not fit the data."""
        if isinstance(self._producer, GivenProducer):
            await self._producer.check_first(self._data.dataset)

    async def close(self) -> None:
        """Orderly end."""
        await self.servicer.close()
        await self.production.give_back()

    async def _end_run(self, cause: str) -> None:
        """The data is used up before the run is done: say so and end the run, because waiting would last for ever."""
        activity = self._status.activity("production")
        account = await until_available(self._ledger.account, "Redis", activity.waiting)
        dead = await until_available(lambda: self._ledger.groups("dead"), "Redis", activity.waiting)
        lost = [f"{count} were dropped ({reason})" for reason, count in account.dropped.items()]
        lost += [f"{len(dead)} are dead, the last one of: {dead[-1].detail}"] if dead else []
        reason = (
            f"rollout needs {cause}; {'; '.join(lost) or 'none was lost'}. "
            "Raise data.epochs, lower run.steps, or mend what the groups were lost for"
        )
        log.error("the run cannot go on: %s", reason)
        request = coordinator_pb.FinishRunRequest(
            request_id=f"starved/{self._status.incarnation}", run_id=self._config.run.name,
            state=coordinator_pb.RUN_STATE_FAILED, reason=reason,
        )  # fmt: skip
        await until_available(
            lambda: self._coordinator.FinishRun(request, timeout=FINISH_SECONDS),
            "the coordinator", activity.waiting,
        )  # fmt: skip


async def _nothing_due(version: WeightVersion) -> None:
    """Without engines nothing is evaluated while the run trains."""
