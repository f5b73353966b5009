"""A look at the very first groups, so that a wrong prompt, template or label is seen at once and not after a day."""

from __future__ import annotations

import logging

from paceline.samples import Sample, SampleGroup

log = logging.getLogger(__name__)

_SHOWN = 400


class FirstLook:
    """Shows the first group in the log, and warns when not one sample of the first step was right (if `graded`)."""

    def __init__(self, groups_per_step: int, graded: bool = True) -> None:
        self._left = groups_per_step
        self._graded = graded
        self._best = 0.0
        self._first: SampleGroup | None = None

    def add(self, group: SampleGroup) -> None:
        """A graded group, kept or not."""
        if self._left == 0:
            return
        if self._first is None:
            self._first = group
            log.info("first group: %s", _described(group))
        self._left -= 1
        self._best = max([self._best, *(sample.reward_value or 0.0 for sample in group.samples)])
        if self._graded and self._left == 0 and self._best <= 0:
            log.warning(
                "no sample of the first step has a reward above 0, so there is nothing to learn from yet; "
                "is the prompt what the model expects, and the label what the grader expects? %s",
                _described(self._first),
            )


def _described(group: SampleGroup) -> str:
    sample: Sample = max(group.samples, key=lambda item: item.reward_value or 0.0)
    reward = "missing" if sample.reward_value is None else f"{sample.reward_value:g}"
    return (
        f"{group.group_id}: prompt {group.prompt_text[-_SHOWN:]!r}, answer {sample.text[:_SHOWN]!r}, reward {reward}, "
        f"metadata {group.metadata_json[:_SHOWN]}"
    )
