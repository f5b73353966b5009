"""Prompts from a Parquet file, one row a prompt."""

from __future__ import annotations

from typing import Any

from paceline.config import ConfigError
from paceline.plugins import registry
from paceline.tokenizer import require
from services.rollout.sources.base import Malformed, MalformedRecords, Prompt, RecordOptions, to_prompt


@registry("source").register("parquet")
class Parquet:
    """`{name = "parquet", path = "train.parquet", stop = 1000}`. Rows stay in Arrow's columns until asked for."""

    class Options(RecordOptions):
        """Options of the parquet source."""

    def __init__(self, options: Options, max_malformed: int = 0) -> None:
        self._options = options
        self._path = options.open_path()
        arrow = require("pyarrow")
        try:
            self._table: Any = require("pyarrow.parquet").read_table(self._path)
        except arrow.ArrowInvalid as error:
            raise ConfigError(f"data file {self._path} is not a Parquet file: {error}") from error
        for field in filter(None, (options.prompt_field, options.id_field)):
            if field not in self._table.column_names:
                raise ConfigError(
                    f"data file {self._path} has no column {field!r}; its columns are {self._table.column_names}"
                )
        faults = MalformedRecords(max_malformed)
        usable = self._usable(faults)
        faults.check()
        self.malformed = faults.count
        self._chosen = usable[options.start : options.stop]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Prompt:
        return self._prompt(self._chosen[index])

    def _usable(self, faults: MalformedRecords) -> list[int]:
        """Rows with a prompt. Only that column is looked at: decoding the others would take long and find nothing."""
        name, usable = self._options.prompt_field, []
        options = self._options.model_copy(update={"id_field": ""})
        for row, value in enumerate(self._table.column(name).to_pylist()):
            try:
                to_prompt({name: value}, options, "")
            except Malformed as fault:
                faults.add(f"{self._path}: row {row}", fault)
            else:
                usable.append(row)
        return usable

    def _prompt(self, row: int) -> Prompt:
        record = {name: self._table.column(name)[row].as_py() for name in self._table.column_names}
        return to_prompt(record, self._options, f"{self._path.name}:{row}")
