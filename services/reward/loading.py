"""From a grader's name to a grader, inside a worker: a built-in, an entry point, a class or a plain function."""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.config import ConfigError, PluginTable, StrictModel, plugin_options
from paceline.environment.reward import inspect_reward
from paceline.plugins import UnknownPlugin, registry
from services.reward.graders.base import GradeItem, Grader


class GraderRefused(ValueError):
    """A grader cannot be made from what was asked; the text names the place, the fault and the fix."""


@dataclass(frozen=True)
class LoadedGrader:
    """A grader ready to grade."""

    name: str
    """Name of its component in results."""
    grader: Grader
    source_file: str
    """File of its code, to point at the line of an exception."""


class FunctionGrader:
    """A user's function as a grader."""

    class Options(StrictModel):
        """A function has none."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.signature = inspect_reward(function)

    def required_metadata(self) -> tuple[str, ...]:
        return ()

    def grade(self, item: GradeItem) -> Any:
        given = {name: getattr(item, name) for name in self.signature.arguments}
        result = self._function(**given)
        return asyncio.run(_finish(result)) if inspect.isawaitable(result) else result


async def _finish(result: Any) -> Any:
    return await result


def load(name: str, options: dict[str, Any], where: str) -> LoadedGrader:
    """Import and build a grader. GraderRefused, with `where` in its text, for anything wrong in it."""
    try:
        item: Any = registry("grader").load(name)
        if isinstance(item, type) and hasattr(item, "Options"):
            grader = item(_options(name, options, item.Options, where))
            return LoadedGrader(name, grader, _source_file(item))
        _options(name, options, FunctionGrader.Options, where)
        function = FunctionGrader(item)
        return LoadedGrader(function.signature.name, function, _source_file(item))
    except ConfigError as error:
        raise GraderRefused(str(error)) from error
    except UnknownPlugin as error:
        raise GraderRefused(f"{where}: {error}") from error
    except (Exception, SystemExit) as error:
        # Foreign code runs while it is imported and built.
        raise GraderRefused(f"{where}: grader {name!r} cannot be loaded: {describe(error)}") from error


def _options(name: str, options: dict[str, Any], model: type[StrictModel], where: str) -> Any:
    if "name" in options:
        raise ConfigError(f"unknown key '{where}.name': the grader's name is not one of its options")
    return plugin_options(PluginTable.model_validate({**options, "name": name}), model, where)


def _source_file(item: Any) -> str:
    try:
        return inspect.getsourcefile(inspect.unwrap(item)) or ""
    except TypeError:
        return ""


def describe(error: BaseException, source_file: str = "") -> str:
    """One line: the exception's type and text, and the last line of `source_file` that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == source_file] or frames
    place = f" ({own[-1].filename.rsplit('/', 1)[-1]}:{own[-1].lineno})" if own else ""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{place}" if text else f"{type(error).__name__}{place}"
