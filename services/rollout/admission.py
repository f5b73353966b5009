"""Admission: how many groups may be issued now, so that none of them must become too old. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.api.common.v1.generation_pb2 import VersionGate
from paceline.config import RunFile
from paceline.config.kinds import is_generated


@dataclass(frozen=True)
class Bounds:
    """What limits production, from the run file."""

    groups_per_step: int
    steps: int
    max_staleness: int | None
    """None: unbounded."""
    max_in_flight: int
    buffer_groups: int
    in_data_order: bool = False
    """The trainer takes groups in the order of the data, so each that is issued needs a place that it can be put in."""

    @classmethod
    def of(cls, config: RunFile) -> Bounds:
        """The bounds that a run file sets."""
        rollout = config.rollout
        given = not is_generated(config)
        staleness = None if given or rollout.max_staleness == "unbounded" else rollout.max_staleness
        return cls(
            rollout.groups_per_step, config.run.steps, staleness, rollout.max_in_flight, rollout.buffer_groups, given
        )

    @property
    def need(self) -> int:
        """Groups that the whole run trains on."""
        return self.steps * self.groups_per_step

    def ceiling(self, step: int) -> int:
        """Most groups that may be issued, not counting dropped and dead ones, while the newest weights are those of
        `step`. A group with that number is consumed at step + max_staleness + 1 at the latest."""
        if self.max_staleness is None:
            return self.need
        return min((step + self.max_staleness + 1) * self.groups_per_step, self.need)

    def gate(self, weight_version: int) -> VersionGate:
        """Which weights may produce tokens of a group that is admitted while `weight_version` is the newest."""
        if self.max_staleness == 0:
            return VersionGate(exact_version=weight_version)
        if self.max_staleness is None:
            return VersionGate()
        return VersionGate(min_version=max(1, weight_version - self.max_staleness))


@dataclass(frozen=True)
class Standing:
    """Where the ledger stands."""

    counted: int
    """Issued, without dropped and dead."""
    waiting: int
    """Issued, and to be issued again."""
    generating: int
    buffered: int
    claimed: int
    exhausted: bool
    """The data has no further prompt."""


@dataclass(frozen=True)
class Decision:
    """How many to issue, or why none."""

    count: int
    ceiling: int
    cause: str = ""
    """What must change before more may be issued; empty when some may."""
    finished: bool = False
    """Every group that the run needs was issued."""
    starved: bool = False
    """The data is used up, and what is left does not fill a step: the run cannot go on."""


def decide(bounds: Bounds, step: int, in_flight: int, standing: Standing) -> Decision:
    """What may be issued while the newest weights are those of `step` and `in_flight` groups are being made here."""
    ceiling = bounds.ceiling(step)
    room = bounds.max_in_flight - in_flight
    open_numbers = 0 if standing.exhausted else ceiling - standing.counted
    wanted = open_numbers + standing.waiting
    if standing.counted > ceiling:
        # The trainer went back to a checkpoint: what waits belongs to later steps, whose weights it must replay first.
        last_step = -(-standing.counted // bounds.groups_per_step)
        behind = last_step - (bounds.max_staleness or 0) - 1
        return Decision(0, ceiling, f"weights of step {behind} from the trainer, which replays step {step}")
    places = _places(bounds, standing)
    if wanted > 0 and room <= 0:
        return Decision(0, ceiling, f"one of {in_flight} groups in flight (rollout.max_in_flight)")
    if wanted > 0 and places <= 0:
        return Decision(
            0, ceiling, f"room in the stream: {standing.buffered} groups wait for the trainer (rollout.buffer_groups)"
        )
    if wanted > 0:
        return Decision(min(room, wanted, places) if bounds.in_data_order else min(room, wanted), ceiling)
    if standing.counted >= bounds.need:
        return Decision(0, ceiling, "nothing: every group of the run was issued", finished=True)
    if standing.exhausted and standing.counted < ceiling:
        open_groups = standing.generating + standing.claimed
        cause = (
            f"more data: every prompt was issued, {standing.counted} of the {bounds.need} groups of the run are left"
        )
        return Decision(0, ceiling, cause, starved=not open_groups and standing.buffered < bounds.groups_per_step)
    return Decision(0, ceiling, f"weights of step {step + 1} from the trainer")


def _places(bounds: Bounds, standing: Standing) -> int:
    """Groups that may be issued with regard to the stream."""
    if not bounds.in_data_order:
        return bounds.buffer_groups - standing.buffered
    # What is issued again stands before what is buffered, and the trainer waits for it: it must not wait for a place.
    taken = standing.buffered + standing.generating + standing.waiting
    return standing.waiting + max(0, bounds.buffer_groups - taken)
