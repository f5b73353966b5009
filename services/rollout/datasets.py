"""From a group id to its prompt: the source that the run file names, and the order of the data in an epoch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from paceline.config import ConfigError, PluginTable, load_plugin, plugin_options
from paceline.config.data import DataConfig
from paceline.ids import GroupId
from services.rollout.sources._records import RecordOptions, to_prompt
from services.rollout.sources.base import Malformed, MalformedRecords, Prompt, Source


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
    if hasattr(plugin, "Options"):
        source: Source = plugin(plugin_options(table, plugin.Options, where), max_malformed)
    else:
        source = FunctionSource(_call(plugin, table.options(), where), table.name, max_malformed)
    if len(source) == 0:
        raise ConfigError(f"{where}: the source {table.name!r} has no prompts with {json.dumps(table.options())}")
    return source


def _call(function: Callable[..., Sequence[Any]], options: Mapping[str, Any], where: str) -> Sequence[Any]:
    try:
        items = function(**options)
    except TypeError as error:
        raise ConfigError(f"{where}: {error}") from error
    if isinstance(items, str) or not isinstance(items, Sequence):
        raise ConfigError(f"{where}: the function returned {type(items).__name__}; it must return a list of prompts")
    return items


class DataOrder:
    """Which prompt a group is made of. The order depends on the seed alone, not on a library's random generator."""

    def __init__(self, size: int, seed: int, shuffle: bool) -> None:
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._epoch = -1
        self._permutation: list[int] = []

    def source_index(self, group: GroupId) -> int:
        """Index in the source of a group. IndexError when the group lies beyond the data."""
        if group.index >= self._size:
            raise IndexError(f"group {group} lies beyond the data of {self._size} prompts")
        if not self._shuffle:
            return group.index
        if group.epoch != self._epoch:
            self._permutation = permutation(self._size, self._seed + group.epoch)
            self._epoch = group.epoch
        return self._permutation[group.index]


def permutation(size: int, seed: int) -> list[int]:
    """An order of range(size) by the hashes of its members: equal in every version of Python and on every machine."""
    return sorted(range(size), key=lambda item: hashlib.sha256(f"{seed}/{item}".encode()).digest())


class Dataset:
    """Prompts by group id."""

    def __init__(self, source: Source, data: DataConfig, seed: int) -> None:
        self._source = source
        self._order = DataOrder(len(source), seed, data.shuffle)
        self.epochs = data.epochs

    def __len__(self) -> int:
        return len(self._source)

    def prompt(self, group_id: str) -> Prompt:
        """The prompt of a group, the same in every attempt."""
        return self._source[self._order.source_index(GroupId.parse(group_id))]


def check_enough(dataset_size: int, epochs: int, steps: int, groups_per_step: int) -> None:
    """ConfigError when the run needs more groups than the data has."""
    need, have = steps * groups_per_step, dataset_size * epochs
    if need > have:
        raise ConfigError(
            f"the run needs {need} groups (run.steps = {steps} x rollout.groups_per_step = {groups_per_step}) but the "
            f"data has {have} ({dataset_size} prompts x data.epochs = {epochs}); set data.epochs = "
            f"{-(-need // dataset_size)} or run.steps = {have // groups_per_step}"
        )
