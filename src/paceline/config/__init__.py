"""Run files and settings: strict, typed, with errors that name the key and the fix."""

from paceline.config.base import PluginTable, StrictModel
from paceline.config.errors import ConfigError
from paceline.config.plugin_table import load_plugin, make_plugin
from paceline.config.run_file import RunFile, load_run_file, parse, plugin_options

__all__ = [
    "ConfigError", "PluginTable", "RunFile", "StrictModel", "load_plugin", "load_run_file", "make_plugin", "parse",
    "plugin_options",
]  # fmt: skip
