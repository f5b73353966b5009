"""Start order, supervision and stop of a whole run on one machine: one launcher a run folder."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import grpc.aio

from paceline import files
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.config import ConfigError, RunFile, load_run_file, make_plugin
from paceline.config.errors import EXIT_CONFIG
from paceline.config.kinds import services_of
from paceline.config.place import SERVICES
from paceline.ids import new_id
from paceline.launcher import leftovers
from paceline.launcher.lock import lock_directory
from paceline.launcher.process import Child, Spec, StartFailed
from paceline.launcher.redis_server import RedisServer
from paceline.rpc.client import open_channel
from paceline.rpc.runtime import EXIT_RUN_FAILED

log = logging.getLogger(__name__)

Notify = Callable[[str], None]
CALL_SECONDS = 2.0
LEAVE_SECONDS = 8.0
"""How long members that the launcher did not start may take to leave when the run is taken down."""


class Launcher:
    """All processes of a run. `start`, then `watch` until the run is done or cannot go on, then `stop`, always."""

    def __init__(self, config: RunFile, notify: Notify = lambda _: None, services: Sequence[str] = ()) -> None:
        self.config = config
        self._services = services or services_of(config)
        self.directory = config.directory
        self.children: dict[str, Child] = {}
        self.addresses: dict[str, str] = {}
        self.finished = asyncio.Event()
        self.failure = ""
        self._notify = notify
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        self._redis: RedisServer | None = None
        self._lock: IO[str] | None = None
        self._ready = False
        self._began = time.time()

    @property
    def redis_url(self) -> str:
        return self.config.launcher.redis_url or (self._redis.url if self._redis else "")

    async def start(self) -> None:
        """Start everything in order, each once the one before serves.

        ConfigError when the folder is another launcher's or holds another run. StartFailed names who did not start.
        """
        self._lock = lock_directory(self.directory)
        self._check_same_run()
        for item in await asyncio.to_thread(leftovers.remove):
            self._notify(f"removed {item.path}, {item.num_bytes / 2**20:.0f} MiB of the run in {item.run_directory}")
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        self._write_addresses()
        self._write("config.json", self.config.model_dump_json(indent=2))
        if not self.config.launcher.redis_url:
            await self._start_redis()
        for service in self._services:
            if service == "engine":
                await asyncio.gather(
                    *(self._start_service("engine", index) for index in range(self.config.engine.replicas))
                )
            else:
                await self._start_service(service, 0)
            if service == "coordinator":
                await self._create_run()
        self._ready = True
        self._write_addresses()

    def _check_same_run(self) -> None:
        earlier = self.directory / "config.json"
        if not earlier.exists():
            return
        try:
            before = load_run_file(earlier).identity()
        except ConfigError as error:
            raise ConfigError(
                f"{self.directory} holds a run that this version cannot read ({error}); choose another run.name, or "
                "pass --fresh to set the earlier run aside"
            ) from error
        now = self.config.identity()
        changed = sorted(key for key in before.keys() | now.keys() if before.get(key) != now.get(key))
        if changed:
            listed = "; ".join(f"{key} was {before.get(key)!r}, is {now.get(key)!r}" for key in changed[:5])
            more = f"; and {len(changed) - 5} more" if len(changed) > 5 else ""
            raise ConfigError(
                f"{self.directory} holds a run with another configuration ({listed}{more}); choose another run.name, "
                "put these back to go on with that run, or pass --fresh to set the earlier run aside"
            )

    async def _create_run(self) -> None:
        """Open the run, or open it again, before its members look at it."""
        request = pb.CreateRunRequest(
            request_id=new_id(), run_id=self.config.run.name, config_digest=self.config.digest(),
            num_steps=self.config.run.steps, resume=True,
        )  # fmt: skip
        async with open_channel(self.addresses["coordinator-0"]) as channel:
            await pb_grpc.CoordinatorServiceStub(channel).CreateRun(request, timeout=10.0)  # type: ignore[misc]

    async def _start_redis(self) -> None:
        for attempt in range(5):
            self._redis = RedisServer(self.directory / "redis")
            try:
                await self._launch(self._redis.spec())
                return
            except StartFailed:
                if attempt == 4:
                    raise

    async def _start_service(self, service: str, index: int) -> None:
        name = f"{service}-{index}"
        spec = Spec(
            name=name, argv=lambda: self._argv(service, name), env=lambda: self._env(service, name),
            final=(0, EXIT_RUN_FAILED) if service == "trainer" else (),
        )  # fmt: skip
        child = await self._launch(spec)
        self.addresses[name] = child.announced.get("address", "")
        self._write_addresses()

    async def _launch(self, spec: Spec) -> Child:
        child = Child(spec, self.directory / "logs" / f"{spec.name}.log")
        self.children[spec.name] = child
        self._notify(f"starting {spec.name}")
        await child.start(self.config.launcher.start_timeout_seconds)
        task = asyncio.create_task(self._supervise(child), name=f"supervise {spec.name}")
        self._tasks.add(task)
        return child

    def _argv(self, service: str, name: str) -> list[str]:
        argv = [sys.executable, "-m", f"services.{service}", str(self.directory / "config.json")]
        announced = self.children[name].announced if name in self.children else {}
        # A restart keeps the ports of the first start, which the others know.
        if announced:
            argv += ["--listen", announced["address"]]
            if "http_address" in announced:
                argv.insert(4, f"{service}.listen={announced['http_address']}")
        return argv

    def _env(self, service: str, name: str) -> dict[str, str]:
        section = getattr(self.config, service, None)
        threads = str(getattr(section, "threads", 1))
        env = {
            "PACELINE_MEMBER_ID": name, "PACELINE_REDIS_URL": self.redis_url,
            "OMP_NUM_THREADS": threads, "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        }  # fmt: skip
        for other in SERVICES:
            address = self.addresses.get(f"{other}-0")
            if address:
                env[f"PACELINE_{other.upper()}_ADDR"] = address
        if "dashboard-0" in self.addresses and service != "dashboard":
            env["PACELINE_OTLP"] = self.addresses["dashboard-0"]
        paths = [str(Path.cwd()), os.environ.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        return env

    async def _supervise(self, child: Child) -> None:
        """Restart with backoff whatever ends without being told to."""
        while True:
            code = await child.wait()
            if code in child.spec.final:
                self.finished.set()
                return
            if code == EXIT_CONFIG:
                self._fail(f"{child.spec.name} refused its configuration\n{child.log_tail()}")
                return
            delay = child.may_restart(self.config.launcher.max_restarts)
            if delay is None:
                self._fail(f"{child.spec.name} failed too often (last exit code {code})\n{child.log_tail()}")
                return
            self._notify(f"{child.spec.name} ended ({_describe(code)}); restarting")
            await asyncio.sleep(delay)
            try:
                await child.start(self.config.launcher.start_timeout_seconds)
                self._notify(f"{child.spec.name} is back")
            except StartFailed as error:
                if child.last_exit == EXIT_CONFIG:
                    self._fail(str(error))
                    return
                self._notify(f"{child.spec.name} did not come back: {str(error).splitlines()[0]}")

    def _fail(self, reason: str) -> None:
        self.failure = self.failure or reason
        self.failed.set()

    async def watch(self) -> bool:
        """Return True when the trainer has finished its run, False when a process cannot go on (`failure` says why)."""
        waits = [asyncio.create_task(self.finished.wait()), asyncio.create_task(self.failed.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()
        return not self.failed.is_set()

    async def stop(self) -> None:
        """Stop everything in reverse order of the start; Redis last, so that the others can say goodbye.

        Raises nothing, so that what ended the run stays to be seen. Nothing happens when the folder is another's.
        """
        if self._lock is None:
            return
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name, child in reversed(self.children.items()):
            if name == "coordinator-0" and child.pid is not None:
                await self._say_stopped()
            await child.stop(self.config.launcher.stop_timeout_seconds)
        try:
            (self.directory / "launcher.json").unlink(missing_ok=True)
            await asyncio.to_thread(self._free_memory)
        except (OSError, ConfigError) as error:
            log.warning("not all of the run in %s was cleared away: %s", self.directory, error)
        finally:
            self._lock.close()
            self._lock = None

    async def _say_stopped(self) -> None:
        """Tell members that are not ours, as engines attached by hand, that the run is taken down; let them leave."""
        request = pb.FinishRunRequest(
            request_id=new_id(), run_id=self.config.run.name, reason=self.failure.partition("\n")[0] or "taken down",
            state=pb.RUN_STATE_FAILED if self.failure else pb.RUN_STATE_STOPPED,
        )  # fmt: skip
        members = pb.ListMembersRequest(run_id=self.config.run.name)
        said: list[str] = []
        try:
            async with asyncio.timeout(LEAVE_SECONDS), open_channel(self.addresses["coordinator-0"]) as channel:
                stub: pb_grpc.CoordinatorServiceAsyncStub
                stub = pb_grpc.CoordinatorServiceStub(channel)  # type: ignore[assignment]
                run = (await stub.FinishRun(request, timeout=CALL_SECONDS)).run
                while run.state == pb.RUN_STATE_STOPPED:
                    response = await stub.ListMembers(members, timeout=CALL_SECONDS)
                    others = [item.member_id for item in response.members if item.member_id not in self.children]
                    if not others:
                        return
                    if others != said:
                        self._notify(f"waiting for {', '.join(others)} to leave")
                        said = others
                    await asyncio.sleep(0.2)  # a poll on the membership, under the deadline of the block
        except (grpc.aio.AioRpcError, TimeoutError, KeyError) as error:
            log.info("the end of the run was not heard by all: %s", error)

    def _free_memory(self) -> None:
        """Give back what published weights hold in memory; a later start publishes the checkpoint's again."""
        table = self.config.weights.transport
        transport = make_plugin("transport", table, "weights.transport", self.directory, self.config.run.name)
        if not getattr(transport, "durable", True):
            transport.collect(set())

    def _write_addresses(self) -> None:
        """Tell `paceline status` and its like where everything is."""
        announced = {name: child.announced for name, child in self.children.items()}
        content = {
            "pid": os.getpid(), "started": self._began, "ready": self._ready, "redis_url": self.redis_url,
            "addresses": self.addresses,
            "http": {name: item["http_address"] for name, item in announced.items() if "http_address" in item},
            "pids": {name: child.pid for name, child in self.children.items()},
        }  # fmt: skip
        self._write("launcher.json", json.dumps(content, indent=2))

    def _write(self, name: str, text: str) -> None:
        files.replace(self.directory / name, text + "\n")


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
