"""metrics.jsonl of a run: one line a trained step, without gap or duplicate however often the trainer restarts."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from paceline.files import replace


class MetricsFile:
    """Step records as lines of JSON, in step order."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def rewind(self, step: int, record: dict[str, Any] | None = None) -> dict[str, Any] | None:
        """Keep the lines up to `step`, where training goes on; add its own `record` when it is missing.

        Returns the line of that step: the one that was there, else `record`.
        """
        lines = [line for line in self._lines() if line["step"] <= step]
        if record is not None and all(line["step"] != record["step"] for line in lines):
            lines.append(record)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace(self._path, "".join(_line(item) for item in lines))
        return next((line for line in lines if line["step"] == step), None)

    def append(self, record: dict[str, Any]) -> None:
        """Add the line of a step, whole or not at all: half a line would spoil the next one too."""
        with self._path.open("ab", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            text = _line(record).encode()
            try:
                written = file.write(text)
                if written != len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
            except OSError:
                file.truncate(end)
                raise

    def records(self) -> list[dict[str, Any]]:
        """Every line, in step order."""
        return self._lines()

    def _lines(self) -> list[dict[str, Any]]:
        """Whole lines; a torn last one, left by a crash, is not one."""
        found = []
        if self._path.is_file():
            for text in self._path.read_text().splitlines():
                try:
                    found.append(json.loads(text))
                except ValueError:
                    continue
        return found


def _line(record: dict[str, Any]) -> str:
    return json.dumps(record, allow_nan=False) + "\n"
