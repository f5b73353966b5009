"""What goes wrong in graders, said in the log while it is news: the first faults of each kind, with what to do."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from paceline.api.common.v1 import reward_pb2

log = logging.getLogger(__name__)

FIRST = 5
"""Faults of one kind of one grader that are logged one by one; of the later ones, every thousandth."""
_LATER = 1000
_ADVICE = {
    reward_pb2.MISSING_REASON_TIMEOUT: "raise reward.timeout_seconds, or make the grader faster",
    reward_pb2.MISSING_REASON_GRADER_ERROR: "mend the grader; if it needs more memory, raise reward.memory_mb",
    reward_pb2.MISSING_REASON_INVALID: "return a finite number from the grader",
    reward_pb2.MISSING_REASON_NOT_GRADED: "raise reward.workers, or rollout.group_deadline_seconds",
}


class Faults:
    """Logs missing rewards. Each costs its sample its reward, so that somebody should know of them."""

    def __init__(self) -> None:
        self._seen: Counter[tuple[str, int]] = Counter()

    def add(self, group_id: str, sample_ids: Sequence[str], rewards: Sequence[reward_pb2.Reward]) -> None:
        """Look through the rewards of a request, which are in the order of `sample_ids`."""
        for sample_id, reward in zip(sample_ids, rewards, strict=True):
            for component in reward.components:
                if component.HasField("missing"):
                    self._add(f"group {group_id}, sample {sample_id}", component)

    def _add(self, where: str, component: reward_pb2.RewardComponent) -> None:
        missing = component.missing
        self._seen[component.name, missing.reason] += 1
        count = self._seen[component.name, missing.reason]
        if count > FIRST and count % _LATER:
            return
        reason = reward_pb2.MissingReason.Name(missing.reason).removeprefix("MISSING_REASON_")
        advice = _ADVICE.get(missing.reason, "see the detail")
        rest = f"; from here on every {_LATER}th is logged" if count == FIRST else ""
        log.warning(
            "%s has no reward: grader %s, %s (%s). What helps: %s. Number %d of its kind%s", where, component.name,
            reason, missing.detail or "no detail", advice, count, rest,
        )  # fmt: skip
