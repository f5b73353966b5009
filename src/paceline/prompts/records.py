"""Records of files: an object becomes a prompt, and a slice of the file is taken, in one way for every format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from paceline.config import ConfigError, StrictModel
from paceline.prompts.source import Malformed, Prompt


class RecordOptions(StrictModel):
    """Options of every source that reads records from a file."""

    path: str
    """The file, relative to where the command runs."""
    prompt_field: str = Field(default="prompt", min_length=1)
    """Field with the prompt: a text, or a list of {"role", "content"} messages."""
    id_field: str = ""
    """Field with the prompt's identity; empty takes file and record number."""
    start: int | None = None
    """First record, as in a Python slice: negative counts from the end."""
    stop: int | None = None
    """End of the records, exclusive, as in a Python slice."""

    def open_path(self) -> Path:
        """The file, or ConfigError that names it."""
        path = Path(self.path).absolute()
        if not path.is_file():
            raise ConfigError(f"data file {path} does not exist; a relative path starts from where the command runs")
        return path


def to_prompt(record: Any, options: RecordOptions, where: str) -> Prompt:
    """Make a prompt of one record; every other field becomes metadata. Malformed says what is wrong."""
    if not isinstance(record, dict):
        raise Malformed(f"holds a {type(record).__name__}, not an object with fields")
    if options.prompt_field not in record:
        raise Malformed(f"has no field {options.prompt_field!r}; its fields are {', '.join(sorted(record)) or 'none'}")
    metadata = dict(record)
    prompt = metadata.pop(options.prompt_field)
    prompt_id = where
    if options.id_field:
        if options.id_field not in record:
            raise Malformed(f"has no field {options.id_field!r} (id_field)")
        prompt_id = str(metadata.pop(options.id_field))
    if isinstance(prompt, str) and prompt:
        return Prompt(prompt_id, text=prompt, metadata=metadata)
    if isinstance(prompt, list) and prompt and all(isinstance(item, dict) and "role" in item for item in prompt):
        return Prompt(prompt_id, messages=tuple(prompt), metadata=metadata)
    shown = repr(prompt)
    raise Malformed(
        f"{options.prompt_field!r} is {shown[:60] + '...' if len(shown) > 60 else shown}; it must be a text, not "
        "empty, or a list of messages with a 'role'"
    )
