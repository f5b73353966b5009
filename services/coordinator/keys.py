"""Every Redis key of the coordinator."""

from __future__ import annotations

from paceline.ids import redis_prefix

RUNS = "paceline:coordinator:runs"
"""Set of the ids of all runs."""


class RunKeys:
    """Keys of one run."""

    def __init__(self, run_id: str) -> None:
        self._prefix = redis_prefix(run_id, "coordinator")
        self.run = self._prefix + "run"
        self.revision = self._prefix + "revision"
        self.fence = self._prefix + "fence"
        self.trainer = self._prefix + "trainer"
        self.version_counter = self._prefix + "version_counter"
        self.newest = self._prefix + "newest"
        self.prepared = self._prefix + "prepared"
        self.trimmed = self._prefix + "trimmed"
        self.versions = self._prefix + "versions"
        self.version_fences = self._prefix + "version_fences"
        self.committed = self._prefix + "committed"
        self.members = self._prefix + "members"
        self.leases = self._prefix + "leases"
        self.lease_seconds = self._prefix + "lease_seconds"
        self.checkpoints = self._prefix + "checkpoints"
        self.checkpoint_order = self._prefix + "checkpoint_order"
        self.steps = self._prefix + "steps"
        self.step_order = self._prefix + "step_order"
        self.step_log = self._prefix + "step_log"
        self.step_sequence = self._prefix + "step_sequence"

    def engines(self, weight_version: int) -> str:
        """Hash engine id -> EngineWeights of a version."""
        return f"{self._prefix}engines:{weight_version}"

    def answer(self, request_id: str) -> str:
        """The first answer to a request."""
        return f"{self._prefix}answer:{request_id}"

    def superseded(self, member_id: str, incarnation: str) -> str:
        """Marks an incarnation whose member id was taken over."""
        return f"{self._prefix}superseded:{member_id}:{incarnation}"

    def barrier(self, name: str) -> str:
        """Hash member id -> time of entry; the empty field holds the number of participants."""
        return f"{self._prefix}barrier:{name}"
