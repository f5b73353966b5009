r"""1 when the response's final answer equals the label as mathematics, by math-verify, else 0."""

from __future__ import annotations

from typing import Any

from paceline.config import StrictModel
from paceline.plugins import registry
from services.reward.graders.base import GradeItem, label_text


@registry("grader").register("math")
class Math:
    r"""Compares values: 1/2, 0.5 and \frac{1}{2} are one answer; sets compare without order.

    The final answer is what math-verify finds: a \boxed{} (several are one set), else the last LaTeX or plain number of
    the text; of an equation the right side counts. Decimals are compared rounded to six places. A response without any
    answer is 0. A label that cannot be read is an error, so the component is missing rather than 0.
    """

    class Options(StrictModel):
        label_field: str = "label"
        """Metadata field with the expected answer: a number, plain text such as 1/2, or LaTeX with or without $."""
        require_boxed: bool = False
        r"""Only an answer inside \boxed{} counts."""

    def __init__(self, options: Options) -> None:
        # Costs about 2 s, so not at the top: listing graders or checking their options must not pay for it.
        import math_verify

        self._options = options
        self._verify: Any = math_verify.verify
        self._parse: Any = math_verify.parse
        self._labels: dict[str, Any] = {}

    def required_metadata(self) -> tuple[str, ...]:
        return (self._options.label_field,)

    def grade(self, item: GradeItem) -> float:
        expected = self._expected(label_text(item, self._options.label_field))
        if self._options.require_boxed and r"\boxed{" not in item.response:
            return 0.0
        # The library's own time limit is an alarm signal; the pool's limit stands in for it.
        answer = self._parse(item.response, parsing_timeout=None)
        if not answer:
            return 0.0
        return 1.0 if self._verify(expected, answer, timeout_seconds=None) else 0.0

    def _expected(self, label: str) -> Any:
        """The parsed label, kept for the group's other samples."""
        if label not in self._labels:
            parsed = self._parse(label, parsing_timeout=None) or self._parse(f"${label}$", parsing_timeout=None)
            if not parsed:
                raise ValueError(f"label {label!r:.80} cannot be read as a number or a formula")
            self._labels = {label: parsed}
        return self._labels[label]
