"""1 when the response is the label, character by character, else 0."""

from __future__ import annotations

from paceline.config import StrictModel
from paceline.plugins import registry
from services.reward.graders.base import GradeItem, label_text


@registry("grader").register("exact_match")
class ExactMatch:
    """Compares text with text; "1.0" is not "1" here, the `math` grader compares values."""

    class Options(StrictModel):
        label_field: str = "label"
        """Metadata field that holds the expected text or number."""
        strip: bool = True
        """Ignore white space at both ends of both texts."""
        ignore_case: bool = False
        first_line: bool = False
        """Compare only the response's first line that is not empty: for models that go on after the answer."""

    def __init__(self, options: Options) -> None:
        self._options = options

    def required_metadata(self) -> tuple[str, ...]:
        return (self._options.label_field,)

    def grade(self, item: GradeItem) -> float:
        response = item.response
        if self._options.first_line:
            response = next((line for line in response.splitlines() if line.strip()), "")
        expected = label_text(item, self._options.label_field)
        return 1.0 if self._normalize(response) == self._normalize(expected) else 0.0

    def _normalize(self, text: str) -> str:
        text = text.strip() if self._options.strip else text
        return text.casefold() if self._options.ignore_case else text
