"""Rank 0 and its others without a model: `python rank_scenario.py NAME`. Rank 0 prints what it learnt."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
from pathlib import Path
from typing import Any, cast

from paceline.rpc import errors
from paceline.rpc.parent import die_with_parent
from services.trainer.backends.base import TrainBackend
from services.trainer.ranks.follower import follow
from services.trainer.ranks.leader import Leader
from services.trainer.ranks.start import RankDied, Ranks, Seat, join
from services.trainer.ranks.together import RankFailed
from services.trainer.ranks.world import World


class Scripted:
    """A backend whose calls end as the directory's name says, on the rank that it names: `rank1-full`."""

    kind, vocabulary, updates = "full", 8, 0

    def __init__(self, world: World) -> None:
        self._world = world

    def save_state(self, directory: Path, optimizer: bool = True, background: bool = False) -> None:
        where, how = directory.name.split("-")
        if where not in ("all", f"rank{self._world.rank}"):
            return
        if how == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        if how == "refused":
            raise errors.FailedPrecondition(f"refused on {self._world.rank}")
        raise RuntimeError("a fault of this rank")


def main(name: str) -> None:
    seat = Seat.from_environment(os.environ, 3)
    if seat.by_torchrun or seat.rank > 0:
        die_with_parent(int(os.environ.get("PACELINE_PARENT_PID", os.getppid())))
    if seat.rank > 0:
        world = join(seat, "cpu")
        follow(cast(TrainBackend, Scripted(world)), world)
        world.leave()
        return
    asyncio.run(lead(seat, name))


async def lead(seat: Seat, name: str) -> None:
    ranks = Ranks(seat, "cpu")
    await ranks.start([sys.executable, __file__, name])
    watching = asyncio.create_task(ranks.watch())
    world = await asyncio.to_thread(ranks.join)
    leader = Leader(cast(TrainBackend, Scripted(world)), world)
    print("PIDS", *(ranks.pids.values() or [os.getpid()]), flush=True)
    if name == "errors":
        for what in ("all-refused", "rank1-full", "rank2-refused", "rank0-full", "none-full"):
            print(what, "->", await asyncio.to_thread(told, leader, what), flush=True)
        await asyncio.to_thread(leader.stop)
        world.leave()
        await ranks.stop()
        return
    if name == "fault":
        began = time.monotonic()
        print("call ->", await asyncio.to_thread(told, leader, "rank1-fault"), flush=True)
        try:
            await watching
        except RankDied as error:
            print("watch ->", error, flush=True)
        await ranks.stop()
        print("seconds", time.monotonic() - began, flush=True)
        os._exit(1)
    await watching


def told(leader: Leader, what: str) -> str:
    try:
        leader.save_state(Path("/nowhere") / what)
    except (OSError, RankFailed, errors.PacelineError, RuntimeError) as error:
        number: Any = getattr(error, "errno", None)
        return f"{type(error).__name__} {number} {error}".replace("\n", " ")
    return "done"


if __name__ == "__main__":
    main(sys.argv[1])
