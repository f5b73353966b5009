"""Opens the sources that a run file names: for the check before a start, and for the rollout service, in one way."""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from paceline.config.base import PluginTable
from paceline.config.errors import ConfigError
from paceline.config.plugin_table import load_plugin
from paceline.config.run_file import RunFile, plugin_options
from paceline.prompts.records import RecordOptions, to_prompt
from paceline.prompts.source import Malformed, MalformedRecords, Prompt, Source
from paceline.tokenizer import MissingExtra, Tokenizer


class FunctionSource:
    """What a plain function returned: a sequence of texts, of objects with a `prompt` field, or of Prompts."""

    def __init__(self, items: Sequence[Any], where: str, max_malformed: int) -> None:
        faults = MalformedRecords(max_malformed)
        options = RecordOptions(path=where)
        self._prompts: list[Prompt] = []
        for number, item in enumerate(items):
            try:
                record = {"prompt": item} if isinstance(item, str) else item
                prompt = item if isinstance(item, Prompt) else to_prompt(record, options, f"{where}:{number}")
                self._prompts.append(prompt)
            except Malformed as fault:
                faults.add(f"{where}: item {number}", fault)
        faults.check()
        self.malformed = faults.count

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompts[index]


def open_source(table: PluginTable, where: str, max_malformed: int = 0) -> Source:
    """The source that a table of the run file names; `where` is the table's key, for errors.

    A plug-in with Options is made from them. Anything else callable is called with the table's other keys and must
    return a sequence of prompts. ConfigError for what is wrong, and for a source without any prompt.
    """
    plugin = load_plugin("source", table, where)
    options = plugin_options(table, plugin.Options, where) if hasattr(plugin, "Options") else None
    try:
        source = _make(plugin, options, table, where, max_malformed)
        size = len(source)
    except (ConfigError, MissingExtra) as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise ConfigError(f"{where}: {table.name!r}: {error}") from error
    except Exception as error:
        # Code of the user's may raise anything; a built-in source must show its traceback.
        if ":" not in table.name:
            raise
        raise ConfigError(f"{where}: {table.name!r} raised {type(error).__name__}: {error}{_place(error)}") from error
    if size == 0:
        raise ConfigError(f"{where}: the source {table.name!r} has no prompts with {json.dumps(table.options())}")
    return source


def _make(plugin: Any, options: Any, table: PluginTable, where: str, max_malformed: int) -> Source:
    if options is not None:
        return plugin(options, max_malformed)
    items = plugin(**table.options())
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ConfigError(f"{where}: the function returned {type(items).__name__}; it must return a list of prompts")
    return FunctionSource(items, table.name, max_malformed)


def _place(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" (line {frames[-1].lineno} of {frames[-1].filename})" if len(frames) > 2 else ""


def open_training(config: RunFile) -> Source:
    """The source of the training prompts. ConfigError also when the run needs more of them than there are."""
    source = open_source(config.data.source, "data.source", config.data.max_malformed)
    check_enough(len(source), config.data.epochs, config.run.steps, config.rollout.groups_per_step)
    return source


def open_evaluation(config: RunFile, number: int) -> Source:
    """The source of the evaluation of that number in the run file."""
    table = config.evaluation[number].source
    return open_source(table, f"evaluation.{number}.source", config.data.max_malformed)


def check_template(config: RunFile, tokenizer: Tokenizer) -> None:
    """ConfigError when prompts are to be rendered by a template that the model has not."""
    if config.data.chat_template and not tokenizer.has_chat_template:
        raise ConfigError(
            f"data.chat_template = true, but the model in {config.model.path} has no chat template; "
            "set it to false, or use a model with one"
        )


def check_data(config: RunFile) -> None:
    """Read all that the rollout service reads before it produces anything. ConfigError with a line or more a fault."""
    faults: list[str] = []
    checks: list[Callable[[], Any]] = [lambda: open_training(config)]
    checks += [lambda number=number: open_evaluation(config, number) for number in range(len(config.evaluation))]
    if config.data.chat_template:
        checks.append(lambda: check_template(config, Tokenizer.load(config.model.path)))
    for item in checks:
        try:
            item()
        except (ConfigError, MissingExtra) as error:
            faults += str(error).splitlines()
    if faults:
        raise ConfigError("\n".join(faults))


def check_enough(dataset_size: int, epochs: int, steps: int, groups_per_step: int) -> None:
    """ConfigError when the run needs more groups than the data has."""
    need, have = steps * groups_per_step, dataset_size * epochs
    if need > have:
        fewer = f" or run.steps = {have // groups_per_step}" if have >= groups_per_step else ""
        raise ConfigError(
            f"the run needs {need} groups (run.steps = {steps} x rollout.groups_per_step = {groups_per_step}) but the "
            f"data has {have} ({dataset_size} prompts x data.epochs = {epochs}); set data.epochs = "
            f"{-(-need // dataset_size)}{fewer}"
        )
