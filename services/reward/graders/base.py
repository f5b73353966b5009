"""What a grader is. Graders run in worker processes, so they may block, crash or loop; the pool bounds them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True)
class GradeItem:
    """One finished trajectory as a grader sees it."""

    response: str
    prompt: str
    metadata: dict[str, Any]


class Grader(Protocol):
    """Turns one item into a number.

    A class registered as kind "grader", with a nested `class Options(StrictModel)`; built once in each worker as
    Class(options).
    """

    def required_metadata(self) -> tuple[str, ...]:
        """Metadata fields that every item must have; a request without one is refused before it is queued."""
        ...

    def grade(self, item: GradeItem) -> float | None:
        """The component's value before weighting. None: not graded. An exception makes the component missing."""
        ...


def label_text(item: GradeItem, field: str) -> str:
    """A label as text. TypeError when it is not a string or a number."""
    value = item.metadata[field]
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise TypeError(f"metadata field {field!r} must be a string or a number, not {value!r:.60}")
    return str(value)
