"""Prompts from a file with one JSON object a line; only line positions stay in memory."""

from __future__ import annotations

import array
import json
import os

from paceline.plugins import registry
from services.rollout.sources.base import Malformed, MalformedRecords, Prompt, RecordOptions, to_prompt


@registry("source").register("jsonl")
class Jsonl:
    """`{name = "jsonl", path = "train.jsonl"}`. Every line is checked at the start; blank lines are not records."""

    class Options(RecordOptions):
        """Options of the jsonl source."""

    def __init__(self, options: Options, max_malformed: int = 0) -> None:
        self._options = options
        self._path = options.open_path()
        self._offsets = array.array("Q")
        self._lengths = array.array("Q")
        self._lines = array.array("Q")
        self._file = self._path.open("rb")
        faults = MalformedRecords(max_malformed)
        offset = 0
        for number, line in enumerate(self._file, 1):
            if line.strip():
                try:
                    self._parse(line, number)
                except Malformed as fault:
                    faults.add(f"{self._path}:{number}", fault)
                else:
                    self._offsets.append(offset)
                    self._lengths.append(len(line))
                    self._lines.append(number)
            offset += len(line)
        faults.check()
        self.malformed = faults.count
        self._chosen = range(len(self._offsets))[options.start : options.stop]

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> Prompt:
        record = self._chosen[index]
        line = os.pread(self._file.fileno(), self._lengths[record], self._offsets[record])
        return self._parse(line, self._lines[record])

    def _parse(self, line: bytes, number: int) -> Prompt:
        try:
            record = json.loads(line)
        except ValueError as error:
            raise Malformed(f"is not valid JSON: {error}") from error
        return to_prompt(record, self._options, f"{self._path.name}:{number}")
