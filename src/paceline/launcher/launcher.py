"""Start order, supervision and stop of a whole run on one machine."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from paceline import files
from paceline.api.coordinator.v1 import coordinator_service_pb2 as pb
from paceline.api.coordinator.v1 import coordinator_service_pb2_grpc as pb_grpc
from paceline.config import RunFile, make_plugin
from paceline.config.errors import EXIT_CONFIG
from paceline.config.place import SERVICES
from paceline.ids import new_id
from paceline.launcher.process import Child, Spec, StartFailed
from paceline.launcher.redis_server import RedisServer
from paceline.rpc.client import open_channel

Notify = Callable[[str], None]


class Launcher:
    """All processes of a run. `start`, then `watch` until the run is done or cannot go on, then `stop`, always."""

    def __init__(self, config: RunFile, notify: Notify = lambda _: None, first_engine: int = 0) -> None:
        self.config = config
        self.directory = config.directory
        self.children: dict[str, Child] = {}
        self.addresses: dict[str, str] = {}
        self.finished = asyncio.Event()
        self.failure = ""
        self._notify = notify
        self._first_engine = first_engine
        self._tasks: set[asyncio.Task[None]] = set()
        self.failed = asyncio.Event()
        self._redis: RedisServer | None = None

    @property
    def redis_url(self) -> str:
        return self.config.launcher.redis_url or (self._redis.url if self._redis else "")

    async def start(self) -> None:
        """Start everything in order, each once the one before serves. StartFailed names the one that did not."""
        (self.directory / "logs").mkdir(parents=True, exist_ok=True)
        self._write("config.json", self.config.model_dump_json(indent=2))
        if not self.config.launcher.redis_url:
            await self._start_redis()
        for service in SERVICES:
            if service in ("gateway", "dashboard") and not getattr(self.config, service).enabled:
                continue
            if service == "engine":
                await asyncio.gather(
                    *(self._start_service("engine", index) for index in range(self.config.engine.replicas))
                )
            else:
                await self._start_service(service, 0)
            if service == "coordinator":
                await self._create_run()

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
        name = f"{service}-{self._first_engine + index if service == 'engine' else index}"
        spec = Spec(
            name=name, argv=lambda: self._argv(service, name), env=lambda: self._env(service, name),
            finishes=service == "trainer",
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
            "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1",
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
            if child.spec.finishes and code == 0:
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
        """Stop everything in reverse order of the start; Redis last, so that the others can say goodbye."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for child in reversed(self.children.values()):
            await child.stop(self.config.launcher.stop_timeout_seconds)
        (self.directory / "launcher.json").unlink(missing_ok=True)
        await asyncio.to_thread(self._free_memory)

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
            "pid": os.getpid(), "started": time.time(), "redis_url": self.redis_url, "addresses": self.addresses,
            "http": {name: item["http_address"] for name, item in announced.items() if "http_address" in item},
            "pids": {name: child.pid for name, child in self.children.items()},
        }  # fmt: skip
        self._write("launcher.json", json.dumps(content, indent=2))

    def _write(self, name: str, text: str) -> None:
        files.replace(self.directory / name, text + "\n")


def _describe(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"
