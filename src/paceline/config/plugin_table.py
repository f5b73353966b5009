"""From a table of the run file to the plug-in that it names: the one way in which services make theirs."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from paceline.config.base import PluginTable
from paceline.config.errors import ConfigError
from paceline.config.run_file import plugin_options
from paceline.plugins import UnknownPlugin, registry


def load_plugin(kind: str, table: PluginTable, where: str) -> Any:
    """The class or function that a table names; ConfigError, with the table's key `where`, when there is none."""
    try:
        return registry(kind).load(table.name)
    except UnknownPlugin as error:
        raise ConfigError(f"{where}.name: {error}") from error
    except Exception as error:
        # A module of the user's may raise anything when it is imported; built-in ones must show their traceback.
        if ":" not in table.name:
            raise
        raise ConfigError(
            f"{where}.name: {table.name!r} cannot be imported: {type(error).__name__}: {error}"
        ) from error


def make_plugin(kind: str, table: PluginTable, where: str, *arguments: Any) -> Any:
    """`Class(options, *arguments)` of the class that a table names.

    ConfigError, with the table's key `where`, when there is none, it is no plug-in, or its options are wrong.
    """
    plugin = load_plugin(kind, table, where)
    return plugin(plugin_options(table, options_model(plugin, kind, table, where), where), *arguments)


def options_model(plugin: Any, kind: str, table: PluginTable, where: str) -> type[BaseModel]:
    """The model of a plug-in's options; ConfigError when it has none, and so is no plug-in."""
    options = getattr(plugin, "Options", None)
    if options is None:
        raise ConfigError(f"{where}.name: {table.name!r} is no {kind}: it has no nested class Options")
    return options
