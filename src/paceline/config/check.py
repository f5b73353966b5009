"""What can be checked before anything starts: plug-ins, their options, the model folder, the data."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from paceline.config.base import PluginTable
from paceline.config.errors import ConfigError
from paceline.config.plugin_table import load_plugin, options_model
from paceline.config.run_file import RunFile, plugin_options
from paceline.prompts.opening import check_data

_MAY_BE_FUNCTION = ("source", "grader")
"""Kinds whose plug-in may also be a plain function."""


def check(config: RunFile, data: bool = True) -> None:
    """ConfigError with one line a fault. Engine backends may need torch; they check theirs when they start.

    With `data` every source is opened as the rollout service will open it, which reads the files once.
    """
    faults: list[str] = []
    for kind, table, where in plugin_tables(config):
        try:
            _check_table(kind, table, where)
        except ConfigError as error:
            faults += str(error).splitlines()
    if not faults:
        faults += _critic_faults(config)
    faults += _model_faults(config.model.path)
    if data and config.trainer.loop and not faults:
        check_data(config)
    if faults:
        raise ConfigError("\n".join(faults))


def _model_faults(path: str) -> list[str]:
    if not Path(path).is_dir():
        return [
            f"model.path = {path!r} is no folder; a relative path starts from where the command runs "
            "(`make quickstart` fetches SmolLM2 into models/)"
        ]
    missing = [name for name in ("config.json", "tokenizer.json") if not (Path(path) / name).exists()]
    return [f"model.path = {path!r} has no {missing[0]}; it must be a Hugging Face model folder"] if missing else []


def plugin_tables(config: RunFile) -> list[tuple[str, PluginTable, str]]:
    """Every plug-in table of a run file with its kind and its key."""
    tables: list[tuple[str, PluginTable, str]] = [
        ("episode", config.rollout.episode, "rollout.episode"),
        ("estimator", config.trainer.estimator, "trainer.estimator"),
        ("loss", config.trainer.loss, "trainer.loss"),
        ("policy", config.router.policy, "router.policy"),
        ("transport", config.weights.transport, "weights.transport"),
        ("blob_store", config.rollout.blobs, "rollout.blobs"),
    ]
    if config.trainer.loop:
        tables.append(("source", config.data.source, "data.source"))
    tables += [("correction", item, f"trainer.corrections.{i}") for i, item in enumerate(config.trainer.corrections)]
    tables += [("filter", item, f"rollout.filters.{i}") for i, item in enumerate(config.rollout.filters)]
    tables += [("grader", item, f"reward.graders.{i}") for i, item in enumerate(config.reward.graders)]
    tables += [("source", item.source, f"evaluation.{i}.source") for i, item in enumerate(config.evaluation)]
    return tables


def _check_table(kind: str, table: PluginTable, where: str) -> None:
    plugin = load_plugin(kind, table, where)
    if kind in _MAY_BE_FUNCTION and not hasattr(plugin, "Options"):
        _check_function(plugin, kind, table, where)
    else:
        plugin_options(table, options_model(plugin, kind, table, where), where)


def _critic_faults(config: RunFile) -> list[str]:
    """A critic without an estimator that uses its values would train for nobody, and the other way round."""
    table = config.trainer.estimator
    uses_values = "values" in getattr(load_plugin("estimator", table, "trainer.estimator"), "needs", ())
    if uses_values == (config.trainer.critic is not None):
        return []
    if uses_values:
        return [f"trainer.estimator.name = {table.name!r} needs a critic; add a table [trainer.critic]"]
    return [f"trainer.critic: trainer.estimator.name = {table.name!r} uses no values; leave the table out"]


def _check_function(function: Any, kind: str, table: PluginTable, where: str) -> None:
    """A source is called with its table's other keys; a grader's function takes none of them."""
    if not callable(function):
        raise ConfigError(f"{where}.name: {table.name!r} is neither a {kind} nor a function")
    if kind == "grader" and table.options():
        raise ConfigError(f"{where}: {table.name!r} takes no options, but has {', '.join(table.options())}")
    if kind == "source":
        try:
            inspect.signature(function).bind(**table.options())
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{where}: {table.name!r}: {error}") from error
