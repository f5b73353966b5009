"""1 when a pattern matches the response and, if a group is named, when what it caught is the label."""

from __future__ import annotations

import re

from pydantic import field_validator, model_validator

from paceline.config import StrictModel
from paceline.plugins import registry
from services.reward.graders.base import GradeItem, label_text


@registry("grader").register("regex")
class Regex:
    """Searches with Python's `re`; of several matches the last one counts. A pattern that explodes hits the limit."""

    class Options(StrictModel):
        pattern: str
        group: int | str | None = None
        """Number or name of the group that is compared with the label; without it any match is worth 1."""
        label_field: str = "label"
        """Metadata field of the label; read only with `group`. White space around label and catch is ignored."""
        ignore_case: bool = False

        @field_validator("pattern")
        @classmethod
        def _compiles(cls, value: str) -> str:
            try:
                re.compile(value)
            except re.error as error:
                raise ValueError(f"{value!r} is not a regular expression: {error}") from error
            return value

        @model_validator(mode="after")
        def _has_group(self) -> Regex.Options:
            compiled = re.compile(self.pattern)
            if isinstance(self.group, int) and not 0 <= self.group <= compiled.groups:
                raise ValueError(f"group = {self.group}, but the pattern has {compiled.groups} groups")
            if isinstance(self.group, str) and self.group not in compiled.groupindex:
                raise ValueError(f"group = {self.group!r}, but the pattern names {sorted(compiled.groupindex)}")
            return self

    def __init__(self, options: Options) -> None:
        self._options = options
        self._pattern = re.compile(options.pattern, re.IGNORECASE if options.ignore_case else 0)

    def required_metadata(self) -> tuple[str, ...]:
        return () if self._options.group is None else (self._options.label_field,)

    def grade(self, item: GradeItem) -> float:
        if self._options.group is None:
            return 1.0 if self._pattern.search(item.response) else 0.0
        matches = list(self._pattern.finditer(item.response))
        if not matches:
            return 0.0
        caught = (matches[-1][self._options.group] or "").strip()
        expected = label_text(item, self._options.label_field).strip()
        if self._options.ignore_case:
            caught, expected = caught.casefold(), expected.casefold()
        return 1.0 if caught == expected else 0.0
