"""A trainer of several ranks as processes: rank 0's side of loading and stopping, and the whole of every other rank."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from pathlib import Path
from typing import cast

import torch

from paceline.config import RunFile, load_run_file
from paceline.config.place import Place
from paceline.plugins import registry
from paceline.rpc.parent import die_with_parent
from paceline.rpc.runtime import ServiceContext
from services.trainer.backends.base import TrainBackend
from services.trainer.ranks.follower import follow
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.start import Ranks, Seat, end_by_deadline, join, rank_command
from services.trainer.ranks.together import together
from services.trainer.ranks.world import World
from services.trainer.worker import Worker

log = logging.getLogger(__name__)

_STOP_SECONDS = 3.0


class LedRanks:
    """All ranks of this trainer, one included, from the start of the processes to their end."""

    def __init__(self, context: ServiceContext, worker: Worker) -> None:
        self._config = context.config
        self._worker = worker
        seat = Seat.from_environment(os.environ, self._config.trainer.parallel.ranks)
        self._ranks = Ranks(seat, self._config.trainer.device)
        self._leader: Leader | None = None
        self._world: World | None = None
        if seat.size > 1:
            context.spawn("ranks", self._ranks.watch())
            context.on_stop(self._stop)

    async def start(self) -> dict[int, int]:
        """Start the other processes; their ids by rank. They load the model while this one does."""
        await self._ranks.start(rank_command())
        return self._ranks.pids

    async def load(self) -> TrainBackend:
        """The backend, on all ranks."""
        return await self._worker.run(self._load)

    def _load(self) -> TrainBackend:
        world = self._world = self._ranks.join()
        backend = make_backend(self._config, world)
        if world.size == 1:
            return backend
        self._leader = Leader(backend, world)
        # A cast, as it is not built from a path as backends are.
        return cast(TrainBackend, self._leader)

    def _dismiss(self, leader: Leader, world: World) -> None:
        leader.stop()
        world.leave()

    async def _stop(self) -> None:
        """Let idle ranks end by themselves, and end the others."""
        if self._leader is not None and self._world is not None and not self._ranks.one_died:
            try:
                async with asyncio.timeout(_STOP_SECONDS):
                    await self._worker.run(self._dismiss, self._leader, self._world)
            except (TimeoutError, RuntimeError) as error:
                log.warning("the other ranks were not told to end, and are ended by signals: %s", error or "no time")
        await self._ranks.stop()


def make_backend(config: RunFile, world: World) -> TrainBackend:
    """This rank's part of the backend. When one cannot be made, every rank learns of it."""
    backend_class = registry("train_backend").load(config.trainer.backend)
    return together(world, lambda: backend_class(Path(config.model.path), config.trainer, config.run.seed, world))


def run_rank() -> None:
    """The life of every rank but the first. It ends when rank 0 says so or is gone, or with its own error."""
    parser = argparse.ArgumentParser(prog="python -m services.trainer")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("overrides", nargs="*")
    Place.add_arguments(parser)
    arguments = parser.parse_intermixed_args()
    rank = os.environ["RANK"]
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr,
        format=f"%(asctime)s %(levelname).1s trainer rank {rank} %(name)s: %(message)s",
    )  # fmt: skip
    die_with_parent(int(os.environ.get("PACELINE_PARENT_PID", os.getppid())))
    config = load_run_file(arguments.run_file, arguments.overrides)
    torch.set_num_threads(config.trainer.threads)
    seat = Seat.from_environment(os.environ, config.trainer.parallel.ranks)
    try:
        world = join(seat, config.trainer.device)
        follow(make_backend(config, world), world)
        world.leave()
    finally:
        # Threads of the process group may wait for ranks that are gone.
        end_by_deadline()
