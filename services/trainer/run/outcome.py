"""How a run ended that went through all of its steps: whether it trained anything, and the sentence that says so."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.telemetry import names


@dataclass(frozen=True)
class Outcome:
    """State and reason of a run's end."""

    reason: str
    failed: bool = False
    """Nothing was there to train on, so the policy is the model that the run began with."""


def outcome_of(records: Sequence[Mapping[str, Any]], step: int) -> Outcome:
    """From the records of all steps. A run of which not one trajectory had a reward has failed."""
    missing = sum(record.get(names.REWARD_MISSING, 0) for record in records)
    if missing and not any(names.REWARD_MEAN in record for record in records):
        return Outcome(
            f"not one of the {missing:,.0f} trajectories of {step} steps had a reward, so nothing was trained and the "
            "policy is as it was. `paceline logs -s reward` says why they have none; mend the grader and start anew "
            "with --fresh",
            failed=True,
        )
    if not sum(record.get(names.OPTIMIZER_UPDATES, 1) for record in records):
        groups = sum(record.get(names.GROUPS_TRAINED, 0) for record in records)
        equal = sum(record.get(names.GROUPS_ZERO_VARIANCE, 0) for record in records)
        return Outcome(
            f"went through {step} steps without one update: {equal:.0f} of {groups:.0f} groups had equal rewards"
        )
    return Outcome(f"trained {step} steps")
