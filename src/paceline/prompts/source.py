"""What a data source is: prompts that can be asked for by number, in any order, again and again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.config import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One prompt: `text`, or `messages` ({"role": ..., "content": ...}) that the chat template renders."""

    prompt_id: str
    """Identity in its source, for people."""
    text: str = ""
    messages: tuple[dict[str, Any], ...] = ()
    metadata: dict[str, Any] = field(default_factory=dict)
    """What graders need (label, task); must be JSON."""

    @property
    def shown(self) -> str:
        """The prompt as text for people and graders: the text itself, or the contents of the messages."""
        return self.text or "\n".join(str(message.get("content", "")) for message in self.messages)


class Source(Protocol):
    """A fixed sequence of prompts. `source[i]` is the same prompt at every call and in every process.

    A source plug-in is a class with a nested `Options` model, made as `Class(options, max_malformed)`. It raises
    ConfigError, naming file and line, when more than `max_malformed` records are malformed.
    """

    malformed: int
    """Records that were skipped."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Prompt: ...


class Malformed(ValueError):
    """One record cannot be used; the text says what is wrong with it."""


class MalformedRecords:
    """Counts records that are skipped and remembers the first few for the error."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.count = 0
        self._shown: list[str] = []

    def add(self, where: str, fault: Exception) -> None:
        """Note a malformed record at `where` ("data.jsonl:17")."""
        self.count += 1
        if len(self._shown) < 5:
            self._shown.append(f"{where}: {fault}")

    def check(self) -> None:
        """ConfigError when there are more than the limit."""
        if self.count > self.limit:
            more = f"\n... and {self.count - len(self._shown)} more" if self.count > len(self._shown) else ""
            lines = "\n".join(self._shown)
            raise ConfigError(
                f"{self.count} malformed records; data.max_malformed = {self.limit} allows no more:\n{lines}{more}"
            )
