"""Real service processes for tests: start one, learn its address, kill it, start it again on the same port.

A process started here dies with the test process, however that ends, so that no test leaves an orphan.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from paceline.rpc.announcement import read_announcement

START_SECONDS = 60.0
STOP_SECONDS = 15.0


class ServiceFailed(RuntimeError):
    """The process ended, or did not serve in time; the message holds the end of its log."""


class ServiceProcess:
    """One `python -m services.<service>` process, which can be killed and started again. A name with a dot is a module:
    "paceline.testing.scripted_engine".

    `address` stays the same over restarts; `labels` is what else it announced at its start.
    """

    def __init__(
        self, service: str, run_file: Path, flags: Sequence[str], overrides: Sequence[str], environment: dict[str, str]
    ) -> None:
        self.service = service
        self.address = ""
        self.labels: dict[str, str] = {}
        self._run_file = run_file
        self._flags = list(flags)
        self._overrides = list(overrides)
        self._environment = environment
        self._process: asyncio.subprocess.Process | None = None
        self._log = tempfile.NamedTemporaryFile(prefix=f"{service}-", suffix=".log")  # noqa: SIM115 - lives as long as self

    @property
    def pid(self) -> int:
        """Process id of the running process; ServiceFailed when none runs."""
        if self._process is None or self._process.returncode is not None:
            raise ServiceFailed(f"{self.service} does not run")
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """Exit code of the last process, None while it runs or before the first start."""
        return self._process.returncode if self._process is not None else None

    def log(self) -> str:
        """Everything that the process wrote to its standard streams, over all starts."""
        return Path(self._log.name).read_text(errors="replace")

    async def start(self, timeout: float = START_SECONDS) -> str:
        """Start, wait until it serves, and return its address. ServiceFailed with its log when it ends before."""
        read_end, write_end = os.pipe()
        environment = os.environ | self._environment
        environment |= {"PACELINE_READY_FD": str(write_end), "PACELINE_PARENT_PID": str(os.getpid())}
        module = self.service if "." in self.service else f"services.{self.service}"
        command = [sys.executable, "-m", module, str(self._run_file), *self._overrides]
        command += ["--listen", self.address or "127.0.0.1:0", *self._flags]
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, pass_fds=(write_end,), stdin=asyncio.subprocess.DEVNULL, stdout=self._log, stderr=self._log,
                env=environment,
            )  # fmt: skip
        finally:
            os.close(write_end)
        ready = await self._announcement(read_end, timeout)
        self.address = ready.pop("address")
        self.labels = ready
        return self.address

    async def kill(self) -> None:
        """SIGKILL, as a crash would, and wait until it is gone. No error when it is gone already."""
        await self._end(signal.SIGKILL)

    async def stop(self) -> int:
        """SIGTERM, wait, and return the exit code; SIGKILL when it does not end in time."""
        return await self._end(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal: SIGSTOP freezes the process, SIGCONT lets it go on."""
        os.kill(self.pid, number)

    async def restart(self) -> str:
        """Kill if it runs, and start again on the same port."""
        await self.kill()
        return await self.start()

    async def wait(self, timeout: float = START_SECONDS) -> int:
        """Wait until the process ends by itself and return its exit code."""
        assert self._process is not None, f"{self.service} was never started"
        async with asyncio.timeout(timeout):
            return await self._process.wait()

    async def _end(self, number: signal.Signals) -> int:
        if self._process is None:
            return 0
        if self._process.returncode is None:
            self._process.send_signal(number)
            try:
                async with asyncio.timeout(STOP_SECONDS):
                    await self._process.wait()
            except TimeoutError:
                self._process.kill()
        return await self._process.wait()

    async def _announcement(self, read_end: int, timeout: float) -> dict[str, str]:
        ready = None
        try:
            async with asyncio.timeout(timeout):
                ready = await read_announcement(read_end)
        except TimeoutError:
            pass
        finally:
            os.close(read_end)
        if ready is None:
            await self.kill()
            raise ServiceFailed(f"{self.service} did not serve; its log ends with:\n{self.log()[-4000:]}")
        return ready


@asynccontextmanager
async def service_process(
    service: str,
    run_file: Path,
    *flags: str,
    overrides: Sequence[str] = (),
    redis_url: str = "",
    coordinator: str = "",
    environment: dict[str, str] | None = None,
) -> AsyncIterator[tuple[ServiceProcess, str]]:
    """A started service and its address; stopped at the end of the block.

    `flags` are further flags, as in `"--member-id", "engine-1"`; `overrides` change the run file: `"run.steps=3"`.
    """
    places = ["--redis-url", redis_url] if redis_url else []
    places += ["--coordinator-addr", coordinator] if coordinator else []
    process = ServiceProcess(service, run_file, [*places, *flags], overrides, environment or {})
    try:
        address = await process.start()
        yield process, address
    finally:
        await process.stop()
