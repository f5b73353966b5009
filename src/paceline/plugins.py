"""Plug-ins by name: a built-in module, an entry point, or a `module:attribute` path, loaded when asked for."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any, TypeVar

T = TypeVar("T")

PACKAGES = {
    "estimator": "services.trainer.algorithms",
    "loss": "services.trainer.losses",
    "correction": "services.trainer.corrections",
    "train_backend": "services.trainer.backends",
    "model_family": "services.trainer.models",
    "transport": "paceline.weights.transports",
    "blob_store": "paceline.blobs.stores",
    "engine_backend": "services.engine.backends",
    "source": "services.rollout.sources",
    "episode": "services.rollout.episodes",
    "filter": "services.rollout.filters",
    "grader": "services.reward.graders",
    "policy": "services.router.policies",
}
"""Where the built-ins of each kind live: one module a plug-in, named as the plug-in is."""


class UnknownPlugin(ValueError):
    """No plug-in of that name; the message lists those there are."""


class Registry:
    """Plug-ins of one kind. A built-in registers itself when its module is first imported."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.package = PACKAGES[kind]
        self._items: dict[str, Any] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator that adds a class or function under `name`, which must be the name of its module."""

        def add(item: T) -> T:
            if name in self._items:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._items[name] = item
            return item

        return add

    def load(self, name: str) -> Any:
        """The plug-in called `name`. UnknownPlugin when there is none; an import error of the plug-in itself passes."""
        if ":" in name:
            return _load_path(name, self.kind)
        if name not in self._items and name in self.available():
            importlib.import_module(f"{self.package}.{name}")
        if name in self._items:
            return self._items[name]
        for point in entry_points(group=f"paceline.{self.kind}"):
            if point.name == name:
                return point.load()
        raise UnknownPlugin(self._unknown(name))

    def available(self) -> list[str]:
        """Names of the built-ins, without importing any; empty where the services are not installed."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or spec.submodule_search_locations is None:
            return []
        modules = pkgutil.iter_modules(list(spec.submodule_search_locations))
        return sorted(module.name for module in modules if module.name != "base" and not module.name.startswith("_"))

    def _unknown(self, name: str) -> str:
        names = self.available()
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        return f"unknown {self.kind} {name!r}{hint} Built in: {', '.join(names)}. Your own: 'module:attribute'"


def _load_path(path: str, kind: str) -> Any:
    module_name, _, attribute = path.partition(":")
    if os.getcwd() not in sys.path:
        # `python -m` has it there, a console script such as `paceline` has not; a path must mean one thing to both.
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and not module_name.startswith(error.name):
            raise
        raise UnknownPlugin(
            f"{kind} {path!r}: no module {module_name!r} on the path; start from the folder that holds it"
        ) from error
    if not hasattr(module, attribute):
        raise UnknownPlugin(f"{kind} {path!r}: module {module_name!r} has no {attribute!r}")
    return getattr(module, attribute)


_REGISTRIES: dict[str, Registry] = {}


def registry(kind: str) -> Registry:
    """The registry of a kind: one of the keys of PACKAGES."""
    if kind not in _REGISTRIES:
        _REGISTRIES[kind] = Registry(kind)
    return _REGISTRIES[kind]
