"""The life of a service process: settings, log, trace, server, membership, background tasks, and an end with a reason.

A service's `__main__` is `run_service("router", start)`, where `start(context)` wires its parts together.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import redis.asyncio

from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as coordinator_grpc
from paceline.config import ConfigError, RunFile, load_run_file
from paceline.config.errors import EXIT_CONFIG
from paceline.config.place import Place
from paceline.ids import new_id
from paceline.rpc.announcement import announce
from paceline.rpc.client import open_channel
from paceline.rpc.membership import Membership
from paceline.rpc.parent import die_with_parent
from paceline.rpc.server import InsecureListen, RpcServer, check_listen
from paceline.rpc.status import StatusBoard
from paceline.telemetry import tracing

log = logging.getLogger(__name__)

EXIT_FAILED = 1
EXIT_RUN_FAILED = 3
"""Exit code of a process whose work is at its end, and came to nothing: it is said, and a new start changes nothing."""
WHEN_REFUSED = "PACELINE_WHEN_REFUSED"
_CANCEL_SECONDS = 3.0
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class ServiceContext:
    """What every service's `start` is given."""

    def __init__(self, service: str, place: Place, config: RunFile) -> None:
        self.service = service
        self.place = place
        self.config = config
        self.run_id = config.run.name
        self.member_id = place.member_id or f"{service}-0"
        self.status = StatusBoard(service, self.member_id, new_id(), self.run_id)
        self.status.config_digest = config.digest()
        self.status.config_json = config.model_dump_json()
        self.rpc = RpcServer(self.status)
        self.labels: dict[str, str] = {}
        self.membership: Membership | None = None
        self._channels: dict[str, Any] = {}
        self._redis: redis.asyncio.Redis | None = None
        self._tasks: list[tuple[str, Coroutine[Any, Any, Any]]] = []
        self._closers: list[Callable[[], Awaitable[None]]] = []
        self._stopping = asyncio.Event()
        self.exit_code = 0
        self._reason = ""

    @property
    def incarnation(self) -> str:
        """Differs at every start of the process."""
        return self.status.incarnation

    def channel(self, service: str) -> Any:
        """The channel to a service whose address this place knows; ConfigError says which setting is missing."""
        if service not in self._channels:
            self._channels[service] = open_channel(self.place.address_of(service))
        return self._channels[service]

    def coordinator(self) -> coordinator_grpc.CoordinatorServiceAsyncStub:
        """A stub of the run's coordinator."""
        return coordinator_grpc.CoordinatorServiceStub(self.channel("coordinator"))  # type: ignore[return-value]

    def redis(self) -> redis.asyncio.Redis:
        """The Redis client of this process. Blocking reads must stay under its 30 s socket timeout."""
        if self._redis is None:
            self._redis = redis.asyncio.Redis.from_url(
                self.place.require_redis_url(), socket_timeout=30, socket_connect_timeout=5, health_check_interval=15
            )
        return self._redis

    def spawn(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run a background task from start to stop. If it raises, or ends early by itself, the process ends."""
        self._tasks.append((name, work))

    def on_stop(self, closer: Callable[[], Awaitable[None]]) -> None:
        """Call at the end, last added first."""
        self._closers.append(closer)

    def request_stop(self, exit_code: int = 0, reason: str = "") -> None:
        """End the process in order; the reason is its last line."""
        self.exit_code = exit_code
        self._reason = reason
        self._stopping.set()

    async def serve(self, start: Callable[[ServiceContext], Awaitable[None]]) -> int:
        """Wire, serve until told to stop or a task fails, and take everything down again."""
        check_listen(self.place.listen, self.place.insecure)
        address = self.rpc.bind(self.place.listen)
        if self.service != "coordinator":
            self.membership = Membership(self.coordinator(), self.status, self.place.advertise or address, self.labels)
        try:
            await start(self)
            await self.rpc.start()
            await self.rpc.set_serving(True)
            if self.membership is not None:
                self.spawn("membership", self.membership.run())
            self._announce(address)
            await self._supervise()
        finally:
            await self._close()
        if self._reason:
            log.log(logging.ERROR if self.exit_code else logging.INFO, "%s ends: %s", self.member_id, self._reason)
        return self.exit_code

    def _announce(self, address: str) -> None:
        log.info("%s serves on %s", self.member_id, address)
        if self.place.ready_fd is not None:
            announce(self.place.ready_fd, address, self.labels)

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        for number in _STOP_SIGNALS:
            loop.add_signal_handler(number, self.request_stop)
        tasks = {asyncio.create_task(work, name=name) for name, work in self._tasks}
        tasks.add(asyncio.create_task(self._stopping.wait(), name="stop"))
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        unheard = pending
        while unheard:
            # asyncio.wait_for of Python 3.11, which redis sends with, can swallow a cancellation; so ask again.
            for task in unheard:
                task.cancel()
            _, unheard = await asyncio.wait(unheard, timeout=_CANCEL_SECONDS)
        results = await asyncio.gather(*pending, return_exceptions=True)
        failed = [task for task in done if task.exception() is not None]
        for task in failed:
            log.error("%s of %s failed", task.get_name(), self.member_id, exc_info=task.exception())
        if failed:
            self.exit_code = EXIT_FAILED
        for result in results:
            if isinstance(result, Exception):
                log.error("while stopping: %s", result, exc_info=result)

    async def _close(self) -> None:
        if self.status.state != "DONE":
            self.status.state = "DRAINING"
        for closer in reversed(self._closers):
            await closer()
        if self.membership is not None:
            await self.membership.leave()
        await self.rpc.stop(grace=3.0)
        for channel in self._channels.values():
            await channel.close()
        if self._redis is not None:
            await self._redis.aclose()
        await asyncio.to_thread(tracing.shut_down)


def run_service(service: str, start: Callable[[ServiceContext], Awaitable[None]]) -> None:
    """Entry point of `python -m services.<service>`.

    Exits 2 for a wrong configuration, 3 for a run that has failed, 1 for any other failure, else 0.
    """
    parser = argparse.ArgumentParser(prog=f"python -m services.{service}")
    parser.add_argument("run_file", type=Path, help="run file (TOML), or the resolved config.json of a run")
    parser.add_argument("overrides", nargs="*", help="key=value, as in trainer.optimizer.learning_rate=1e-4")
    Place.add_arguments(parser)
    try:
        arguments = parser.parse_intermixed_args()
    except SystemExit as error:
        _stay_down(int(error.code or 0))
        raise
    logging.basicConfig(
        level=logging.INFO, stream=sys.stderr, format=f"%(asctime)s %(levelname).1s {service} %(name)s: %(message)s"
    )
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        place = Place.from_arguments(arguments)
        config = load_run_file(arguments.run_file, arguments.overrides)
        if place.parent_pid is not None:
            die_with_parent(place.parent_pid)
        member = place.member_id or f"{service}-0"
        endpoint = place.otlp if config.telemetry.enabled else ""
        tracing.set_up(service, config.run.name, member, endpoint, config.telemetry.sample_ratio)
        code = asyncio.run(_serve(service, place, config, start))
    except (ConfigError, InsecureListen) as error:
        print(f"{service}: {error}", file=sys.stderr)
        code = EXIT_CONFIG
    _stay_down(code)
    sys.exit(code)


def _stay_down(code: int) -> None:
    """Under a supervisor that starts again whatever ends, wait to be stopped: a new start would end alike."""
    if code not in (EXIT_CONFIG, EXIT_RUN_FAILED) or os.environ.get(WHEN_REFUSED) != "wait":
        return
    told = threading.Event()
    for number in _STOP_SIGNALS:
        signal.signal(number, lambda *_: told.set())
    print(f"{WHEN_REFUSED}=wait: not started again by itself; mend it and start it anew", file=sys.stderr, flush=True)
    told.wait()


async def _serve(
    service: str, place: Place, config: RunFile, start: Callable[[ServiceContext], Awaitable[None]]
) -> int:
    try:
        return await ServiceContext(service, place, config).serve(start)
    except (ConfigError, InsecureListen):
        raise
    except Exception:
        log.exception("%s could not go on", service)
        return EXIT_FAILED
