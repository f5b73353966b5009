"""Groups that an earlier run dumped (`rollout.dump`): to train on them again without engines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from paceline.config import ConfigError, StrictModel
from paceline.plugins import registry
from paceline.prompts.source import Prompt
from paceline.recording import SUFFIX, read_line
from paceline.samples import InvalidSample, SampleGroup


@dataclass(frozen=True)
class RecordedPrompt(Prompt):
    """A prompt whose samples are there already."""

    group: SampleGroup = None  # type: ignore[assignment]  # A dataclass with defaults above it needs one here.


@registry("source").register("recorded")
class Recorded:
    """`{name = "recorded", path = "runs/earlier/rollouts"}`: a folder of step files in their order, or one file.

    Only the positions of the lines stay in memory.
    """

    class Options(StrictModel):
        """Options of the recorded source."""

        path: str
        """The folder that a run with `rollout.dump` wrote, or one of its files; relative to where the command runs."""
        start: int | None = None
        """First group, as in a Python slice: negative counts from the end."""
        stop: int | None = None
        """End of the groups, exclusive, as in a Python slice."""

    def __init__(self, options: Options, max_malformed: int = 0) -> None:
        path = Path(options.path).absolute()
        files = sorted(path.glob(f"*{SUFFIX}")) if path.is_dir() else [path]
        if not all(file.is_file() for file in files):
            raise ConfigError(
                f"recorded groups {path} do not exist; a relative path starts from where the command runs"
            )
        if not files:
            raise ConfigError(f"{path} has no *{SUFFIX} file; a run writes them with rollout.dump = true")
        self.malformed = 0
        self._lines: list[tuple[Path, int, int]] = []
        for file in files:
            offset = 0
            with file.open("rb") as lines:
                for line in lines:
                    if line.strip():
                        self._lines.append((file, offset, len(line)))
                    offset += len(line)
        self._chosen = range(len(self._lines))[options.start : options.stop]
        if self._chosen:
            self._first_is_readable()

    def __len__(self) -> int:
        return len(self._chosen)

    def __getitem__(self, index: int) -> RecordedPrompt:
        path, offset, length = self._lines[self._chosen[index]]
        with path.open("rb") as file:
            file.seek(offset)
            group = read_line(file.read(length), f"{path.name} at byte {offset}")
        return RecordedPrompt(
            prompt_id=group.prompt_id or group.group_id, text=group.prompt_text,
            metadata=json.loads(group.metadata_json or "{}"), group=group,
        )  # fmt: skip

    def _first_is_readable(self) -> None:
        try:
            self[0]
        except InvalidSample as error:
            raise ConfigError(f"{self._lines[0][0]}: {error}") from error
