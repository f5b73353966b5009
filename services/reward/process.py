"""One grader process as the pool sees it: started warm, asked one thing at a time, and killed with all its children."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from services.reward import frames
from services.reward.loading import GraderRefused

LOAD_SECONDS = 60.0
_EXIT_SECONDS = 5.0


class WorkerEnded(RuntimeError):
    """The process ended, or broke the protocol, before it answered; the text says how."""


class WorkerProcess:
    """A running worker. After an error or a timeout of `call` it is of no more use: kill it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._calling = False
        self._loaded: set[str] = set()
        self.worn_out = False
        """It has used so much memory that it should be replaced."""
        self._watch = asyncio.create_task(self._reap(), name=f"grader process {process.pid}")

    @classmethod
    async def start(cls, memory_mb: int) -> WorkerProcess:
        """Start a worker in a process group of its own, so that a kill reaches what its graders start."""
        # Foreign code gets no addresses and no credentials of the place.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("PACELINE_")}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.reward.worker", "--parent", str(os.getpid()), "--memory-mb", str(memory_mb),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, start_new_session=True, env=environment,
        )  # fmt: skip
        return cls(process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    async def load(self, graders: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Load graders; returns {name, required_metadata} of each. GraderRefused, or what `call` raises."""
        reply = await self.call({"do": "load", "graders": graders}, LOAD_SECONDS)
        if "refused" in reply:
            raise GraderRefused(reply["refused"])
        self._loaded.update(grader["key"] for grader in graders)
        return reply["loaded"]

    async def grade(self, grader: dict[str, Any], item: dict[str, Any], limit: float) -> dict[str, Any]:
        """Grade within `limit` seconds; loading a grader that this worker has not used yet does not count."""
        if grader["key"] not in self._loaded:
            await self.load([grader])
        return await self.call({"do": "grade", "grader": grader, "item": item, "limit": limit}, limit)

    async def call(self, message: dict[str, Any], limit: float) -> dict[str, Any]:
        """Send one message and return its reply. TimeoutError after `limit` seconds; WorkerEnded when it ends first."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        self._calling = True
        try:
            async with asyncio.timeout(limit):
                stdin.write(frames.encode(message))
                await stdin.drain()
                reply = await frames.receive(stdout)
                self.worn_out = reply.get("retire", False)
                return reply
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise WorkerEnded(await self._how_it_ended()) from error
        except frames.BrokenFrame as error:
            raise WorkerEnded(f"the grader process broke its pipe: {error}") from error
        finally:
            self._calling = False

    def kill(self) -> None:
        """Kill the process and its group at once. Does not wait."""
        if self._process.returncode is None:
            self._kill_group()

    def on_end(self, call: Callable[[], None]) -> None:
        """Call this once the process is gone."""
        self._watch.add_done_callback(lambda _: call())

    async def ended(self) -> None:
        """Wait until the process is gone; TimeoutError after a few seconds."""
        async with asyncio.timeout(_EXIT_SECONDS):
            await asyncio.shield(self._watch)

    async def _reap(self) -> None:
        await self._process.wait()
        # A child that a grader left behind would hold the pipe open, and the reader would wait for its end.
        self._kill_group()
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.close()
        if not self._calling:
            # To the end of the pipe, so that the event loop lets go of it. A caller that waits reads it itself.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EXIT_SECONDS):
                    await stdout.read()

    def _kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _how_it_ended(self) -> str:
        try:
            await self.ended()
        except TimeoutError:
            return "the grader process closed its pipe"
        code = self._process.returncode or 0
        if code == -signal.SIGXCPU:
            return "the grader process used too much processor time"
        if code < 0:
            return f"the grader process was ended by {signal.Signals(-code).name}"
        return f"the grader process exited with code {code}"
