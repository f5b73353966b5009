"""Starts the other ranks of a trainer, and ends the whole trainer when one of them dies.

Rank 0 is the process that the launcher knows: it announces itself and is guarded. The others are its children, which
the kernel kills with it. Under torchrun the ranks are there already, and its agent does what `Ranks` does here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from paceline.config import ConfigError
from services.trainer.ranks.world import World

log = logging.getLogger(__name__)

DEADLINE_SECONDS = 20.0
"""After a rank has died the trainer ends in order within this time, or at once when it is over."""
_STOP_SECONDS = 5.0
_LOOPBACK = "127.0.0.1"


class RankDied(RuntimeError):
    """A rank ended while it was needed."""


@dataclass(frozen=True)
class Seat:
    """Which rank this process is, and where the ranks meet."""

    rank: int
    size: int
    local_rank: int
    by_torchrun: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], ranks: int) -> Seat:
        """RANK and its like where they are set, else rank 0. ConfigError when another number of ranks was started."""
        size = int(environment.get("WORLD_SIZE", ranks))
        if size != ranks:
            raise ConfigError(f"{size} ranks were started, but trainer.parallel.ranks = {ranks}; make them equal")
        rank = int(environment.get("RANK", 0))
        return cls(rank, size, int(environment.get("LOCAL_RANK", rank)), "TORCHELASTIC_RUN_ID" in environment)


class Ranks:
    """The ranks beside this one, seen from rank 0."""

    def __init__(self, seat: Seat, device: str) -> None:
        self._seat = seat
        self._device = device
        self._store: Any = None
        self._processes: dict[int, asyncio.subprocess.Process] = {}
        self._stopping = False
        self.one_died = False
        self._started = asyncio.Event()

    @property
    def pids(self) -> dict[int, int]:
        """Process ids by rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    async def start(self, argv: Sequence[str]) -> None:
        """Start `argv` once for each other rank, unless torchrun did. From the main thread: see die_with_parent."""
        if self._seat.size == 1 or self._seat.by_torchrun:
            self._started.set()
            return
        self._store = dist.TCPStore(  # type: ignore[attr-defined]
            _LOOPBACK, 0, self._seat.size, is_master=True, wait_for_workers=False
        )
        _prefer_loopback(os.environ)
        for rank in range(1, self._seat.size):
            env = {
                **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self._seat.size),
                "MASTER_ADDR": _LOOPBACK, "MASTER_PORT": str(self._store.port), "PACELINE_PARENT_PID": str(os.getpid()),
            }  # fmt: skip
            env.pop("PACELINE_READY_FD", None)
            self._processes[rank] = await asyncio.create_subprocess_exec(
                *argv, env=env, stdin=asyncio.subprocess.DEVNULL
            )
        self._started.set()

    def join(self) -> World:
        """Meet the others. Runs in the torch thread."""
        if self._seat.size == 1:
            return World.single(self._device)
        return join(self._seat, self._device, self._store)

    async def watch(self) -> None:
        """Return when the ranks were stopped; RankDied when one ended before."""
        await self._started.wait()
        waits = {asyncio.create_task(item.wait()): rank for rank, item in self._processes.items()}
        if not waits:
            await asyncio.Event().wait()
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        if self._stopping:
            return
        self.one_died = True
        end_by_deadline()
        told = ", ".join(f"rank {waits[task]} {_how(task.result())}" for task in done)
        raise RankDied(
            f"{told}; what it said of that is further up in this log. The trainer ends, as no rank can go on"
        )

    async def stop(self) -> None:
        """End what still runs, politely first."""
        self._stopping = True
        # Signal 0 does nothing: the first round only waits for ranks that were told to end.
        for number in (0, signal.SIGTERM, signal.SIGKILL):
            running = [item for item in self._processes.values() if item.returncode is None]
            if not running:
                break
            for process in running:
                with contextlib.suppress(ProcessLookupError):
                    process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_STOP_SECONDS):
                    await asyncio.gather(*(process.wait() for process in running))
        if not self.one_died:
            self._name_the_dead()

    def _name_the_dead(self) -> None:
        """Say which ranks ended by themselves: an error of this one that a connection was lost comes of that."""
        for rank, process in self._processes.items():
            if process.returncode:
                log.error("rank %d %s; its own words are further up in this log", rank, _how(process.returncode))


def join(seat: Seat, device: str, store: Any = None) -> World:
    """Meet the other ranks at `store`, or where the environment says."""
    if store is None:
        _prefer_loopback(os.environ)
        store, _, _ = next(
            iter(
                dist.rendezvous(  # type: ignore[attr-defined]
                    "env://", seat.rank, seat.size
                )
            )
        )
    return World.join(seat.rank, seat.size, seat.local_rank, device, store)


def end_by_deadline() -> None:
    """End this process after DEADLINE_SECONDS whatever its threads wait for, a dead rank's answer for instance."""

    def end() -> None:
        log.error("a thread still waits for a dead rank after %.0f s; the process ends", DEADLINE_SECONDS)
        os._exit(1)

    timer = threading.Timer(DEADLINE_SECONDS, end)
    timer.daemon = True
    timer.start()


def rank_command() -> list[str]:
    """The command line of this process, for the other ranks."""
    return [sys.executable, "-m", "services.trainer", *sys.argv[1:]]


def _prefer_loopback(environment: Any) -> None:
    """Gloo takes the interface of the host's name, which need not resolve; on one machine loopback always works."""
    if sys.platform == "linux" and environment.get("MASTER_ADDR", _LOOPBACK) in (_LOOPBACK, "localhost"):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _how(code: int) -> str:
    return f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
