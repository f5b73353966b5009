"""One child process: started, announced, healthy, restarted with backoff, stopped with its whole group."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.rpc.announcement import read_announcement

log = logging.getLogger(__name__)

RESTART_WINDOW_SECONDS = 300.0


class StartFailed(RuntimeError):
    """A process did not become ready; the text has its exit code and the end of its log."""


@dataclass(frozen=True)
class Spec:
    """How to start a process. `argv` is asked again at every start, so that a restart can fix the ports it got."""

    name: str
    argv: Callable[[], list[str]]
    env: Callable[[], dict[str, str]]
    announces: bool = True
    """The process writes one line of JSON to PACELINE_READY_FD once it serves."""
    final: tuple[int, ...] = ()
    """Exit codes that are the end of its work, not a fault."""
    ready: Callable[[], Any] | None = None
    """For a process that does not announce: coroutine function that returns once it serves."""


@dataclass
class Child:
    """A supervised process."""

    spec: Spec
    log_path: Path
    state: str = "new"
    restarts: int = 0
    last_exit: int | None = None
    announced: dict[str, str] = field(default_factory=dict)
    process: asyncio.subprocess.Process | None = None
    _recent: deque[float] = field(default_factory=deque)

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None and self.process.returncode is None else None

    async def start(self, timeout: float) -> None:
        """Start and wait until it serves. StartFailed when it exits or stays silent for `timeout` seconds."""
        self.state = "starting"
        read_fd, write_fd = os.pipe()
        env = {**os.environ, **self.spec.env(), "PACELINE_PARENT_PID": str(os.getpid())}
        if self.spec.announces:
            env["PACELINE_READY_FD"] = str(write_fd)
        with self.log_path.open("ab") as output:
            try:
                self.process = await asyncio.create_subprocess_exec(
                    *self.spec.argv(), env=env, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output,
                    pass_fds=[write_fd], start_new_session=True,
                )  # fmt: skip
            finally:
                os.close(write_fd)
        try:
            async with asyncio.timeout(timeout):
                await self._until_ready(read_fd)
        except TimeoutError as error:
            await self.stop(2.0)
            raise StartFailed(f"{self.spec.name} was not ready within {timeout:.0f} s\n{self.log_tail()}") from error
        finally:
            os.close(read_fd)
        self.state = "running"

    async def _until_ready(self, read_fd: int) -> None:
        assert self.process is not None
        ready = asyncio.create_task(self._announcement(read_fd) if self.spec.announces else self._probe())
        exited = asyncio.create_task(self.process.wait())
        try:
            await asyncio.wait({ready, exited}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done() and ready.result():
                return
            code = await exited
        finally:
            ready.cancel()
            exited.cancel()
        self.last_exit = code
        if code in self.spec.final:
            return
        raise StartFailed(f"{self.spec.name} ended with exit code {code}\n{self.log_tail()}")

    async def _announcement(self, read_fd: int) -> bool:
        """Take over what the process announces; False when it closes the pipe without a word."""
        announced = await read_announcement(read_fd)
        self.announced = announced or self.announced
        return announced is not None

    async def _probe(self) -> bool:
        assert self.spec.ready is not None
        await self.spec.ready()
        return True

    async def wait(self) -> int:
        """Wait for the exit and return its code (negative: the signal)."""
        assert self.process is not None
        self.last_exit = await self.process.wait()
        self.state = "exited"
        return self.last_exit

    def may_restart(self, limit: int) -> float | None:
        """Seconds to wait before the next start, or None when it failed too often lately."""
        now = time.monotonic()
        while self._recent and now - self._recent[0] > RESTART_WINDOW_SECONDS:
            self._recent.popleft()
        if len(self._recent) >= limit:
            return None
        self._recent.append(now)
        self.restarts += 1
        return min(0.1 * 2 ** (len(self._recent) - 1), 5.0)

    async def stop(self, timeout: float) -> None:
        """SIGTERM, then SIGKILL to the whole group after `timeout` seconds."""
        if self.process is None or self.process.returncode is not None:
            return
        self.state = "stopping"
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        try:
            async with asyncio.timeout(timeout):
                await self.process.wait()
        except TimeoutError:
            log.warning("%s did not stop within %.0f s; killed", self.spec.name, timeout)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            await self.process.wait()
        self.last_exit = self.process.returncode
        self.state = "exited"

    def log_tail(self, lines: int = 15) -> str:
        """The end of the process's log, indented."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return ""
        return "\n".join("    " + line for line in text.splitlines()[-lines:])
