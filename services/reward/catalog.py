"""The graders of requests and of the run file, checked once each by loading them in a worker."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from paceline.config import ConfigError
from paceline.config.services import GraderTable
from paceline.plugins import registry
from paceline.rpc import errors
from services.reward.loading import GraderRefused
from services.reward.pool import Pool
from services.reward.process import WorkerEnded

_MAX_KNOWN = 256


@dataclass(frozen=True)
class GraderRequest:
    """A grader as it was asked for."""

    name: str
    options: dict[str, Any]
    weight: float
    where: str
    """Where it was asked for, for messages: "reward.graders.0"."""

    def task(self) -> dict[str, Any]:
        """What a worker is told; equal for equal graders, wherever they were asked for."""
        key = json.dumps([self.name, self.options], sort_keys=True)
        return {"key": key, "name": self.name, "options": self.options, "where": self.where}


@dataclass(frozen=True)
class KnownGrader:
    """A checked grader, ready for use in a reward."""

    name: str
    """Name of its component."""
    weight: float
    task: dict[str, Any]
    required_metadata: tuple[str, ...]


class Catalog:
    """Knows every grader that was ever asked for."""

    def __init__(self, pool: Pool, configured: Sequence[GraderTable]) -> None:
        self._pool = pool
        self._configured = [
            GraderRequest(table.name, table.options(), table.weight, f"reward.graders.{index}")
            for index, table in enumerate(configured)
        ]
        self._known: dict[str, dict[str, Any]] = {}

    async def start(self) -> None:
        """Start the pool with the run's graders. ConfigError when one cannot be made."""
        try:
            check_weights(self._configured)
            tasks = [request.task() for request in self._configured]
            for task, item in zip(tasks, await self._pool.start(tasks), strict=True):
                self._known[task["key"]] = {**item, "task": task}
        except (GraderRefused, errors.InvalidArgument) as error:
            raise ConfigError(str(error)) from error
        except (WorkerEnded, TimeoutError) as error:
            names = ", ".join(request.name for request in self._configured)
            raise ConfigError(f"reward.graders ({names}) cannot be loaded: {error or 'it takes too long'}") from error

    def names(self) -> list[str]:
        """Names that a request may use: built in, installed as an entry point, or configured by import path."""
        installed = [point.name for point in entry_points(group="paceline.grader")]
        return sorted({*registry("grader").available(), *installed, *(request.name for request in self._configured)})

    async def resolve(self, requests: Sequence[GraderRequest]) -> list[KnownGrader]:
        """Check the graders of a request. InvalidArgument names the one that is wrong, with the graders there are."""
        check_weights(requests)
        found = [await self._find(request) for request in requests]
        names = distinct(item["name"] for item in found)
        return [
            KnownGrader(name, request.weight, item["task"], tuple(item["required_metadata"]))
            for name, request, item in zip(names, requests, found, strict=True)
        ]

    async def _find(self, request: GraderRequest) -> dict[str, Any]:
        task = request.task()
        if task["key"] not in self._known:
            try:
                (item,) = await self._pool.load([task])
            except GraderRefused as error:
                raise errors.InvalidArgument(str(error)) from error
            except (WorkerEnded, TimeoutError) as error:
                raise errors.InvalidArgument(
                    f"{request.where}: grader {request.name!r} cannot be loaded: {error or 'it takes too long'}"
                ) from error
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[task["key"]] = {**item, "task": task}
        return self._known[task["key"]]


def check_weights(requests: Sequence[GraderRequest]) -> None:
    """Refuse rewards that nothing can contribute to: no graders, a weight that is not finite, all weights zero."""
    if not requests:
        raise errors.InvalidArgument("graders is empty; name at least one grader")
    for request in requests:
        if not math.isfinite(request.weight):
            raise errors.InvalidArgument(
                f"{request.where}: weight = {request.weight} of {request.name!r} is not finite"
            )
    if all(request.weight == 0 for request in requests):
        raise errors.InvalidArgument(
            "every grader has weight 0, so every reward would be 0; set a weight, as in weight = 1"
        )


def distinct(names: Iterable[str]) -> list[str]:
    """The names, a repeated one with its count: regex, regex.2."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        seen[name] = seen.get(name, 0) + 1
        result.append(name if seen[name] == 1 else f"{name}.{seen[name]}")
    return result
