"""The ledger and the sample stream once more, as plain Python: what the scripts in Redis must do."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass, field

from paceline.ids import GroupId


@dataclass
class ModelGroup:
    group_id: str
    state: str = "waiting"
    attempt: int = 1
    failures: int = 0
    owner: str = ""
    expired: bool = False
    step: int = 0
    version: int = 0
    reason: str = ""


@dataclass
class LedgerModel:
    """Every method returns what the real one must return."""

    size: int
    epochs: int
    capacity: int
    groups: dict[str, ModelGroup] = field(default_factory=dict)
    stream: list[str] = field(default_factory=list)
    claims: dict[int, tuple[int, int, list[str]]] = field(default_factory=dict)
    committed_step: int = 0
    base_step: int = 0
    refused_stale: int = 0
    refused_pending: int = 0
    steps: dict[int, list[str]] = field(default_factory=dict)
    settled_before: Counter[str] = field(default_factory=Counter)

    def in_state(self, *states: str) -> list[ModelGroup]:
        found = [group for group in self.groups.values() if group.state in states]
        return sorted(found, key=lambda group: GroupId.parse(group.group_id))

    @property
    def issued(self) -> int:
        return len(self.groups) + sum(self.settled_before.values())

    @property
    def dropped(self) -> Counter[str]:
        count = Counter({k: n for k, n in self.settled_before.items() if k != "committed"})
        count.update(group.reason for group in self.in_state("dropped"))
        return count

    def issue(self, owner: str, count: int, expired: bool, ceiling: int | None) -> list[tuple[str, int]]:
        chosen = self.in_state("waiting")[:count]
        while len(chosen) < count and self.issued < self.size * self.epochs:
            occupied = self.issued - self.dropped.total() - len(self.in_state("dead"))
            if ceiling is not None and occupied >= ceiling:
                break
            group = ModelGroup(f"e{self.issued // self.size}.{self.issued % self.size}")
            self.groups[group.group_id] = group
            chosen.append(group)
        for group in chosen:
            group.state, group.owner, group.expired = "generating", owner, expired
        return [(group.group_id, group.attempt) for group in chosen]

    def give_back(self, group: ModelGroup) -> None:
        group.state, group.attempt, group.step = "waiting", group.attempt + 1, 0
        if group.group_id in self.stream:
            self.stream.remove(group.group_id)

    def renew(self, owner: str, expired: bool) -> int:
        held = [group for group in self.in_state("generating") if group.owner == owner]
        for group in held:
            group.expired = expired
        return len(held)

    def reclaim(self, owner: str | None) -> set[str]:
        taken = [g for g in self.in_state("generating") if (g.expired if owner is None else g.owner == owner)]
        for group in taken:
            self.give_back(group)
        return {group.group_id for group in taken}

    def _current(self, group_id: str, attempt: int) -> ModelGroup | None:
        group = self.groups.get(group_id)
        return group if group is not None and group.attempt == attempt else None

    def put(self, group_id: str, attempt: int, version: int) -> str:
        group = self._current(group_id, attempt)
        if group is not None and group.state in ("buffered", "claimed", "trained", "committed"):
            return "duplicate"
        if group is None or group.state != "generating":
            return "stale_attempt"
        if len(self.in_state("buffered")) >= self.capacity:
            return "full"
        group.state, group.version = "buffered", version
        self.stream.append(group_id)
        return "accepted"

    def drop(self, group_id: str, attempt: int, reason: str) -> str:
        group = self._current(group_id, attempt)
        if group is not None and group.state == "generating":
            group.state, group.reason = "dropped", reason
        return "dropped" if group is not None and group.state == "dropped" else "stale_attempt"

    def fail(self, group_id: str, attempt: int, max_attempts: int) -> str:
        group = self._current(group_id, attempt)
        if group is not None and group.state == "generating":
            group.failures += max_attempts > 0
            if max_attempts == 0 or group.failures < max_attempts:
                self.give_back(group)
                return "reissued"
            group.state = "dead"
        return "dead" if group is not None and group.state == "dead" else "stale_attempt"

    def claim(self, step: int, count: int, version: int, bound: int | None, policy: str) -> tuple | int | None:
        """(version, refused, ids), or how many there are, or None when the step cannot be claimed."""
        if step in self.claims:
            return self.claims[step]
        if step <= max([self.committed_step, *self.claims]):
            return None
        for group in self.in_state("buffered"):
            if bound is not None and version - group.version > bound:
                self.refused_stale += 1
                self.refused_pending += 1
                self.give_back(group)
                if policy == "drop":
                    group.attempt -= 1
                    group.state, group.reason = "dropped", "stale"
        ready = [name for name in self.stream if self.groups[name].state == "buffered"]
        if len(ready) < count:
            return len(ready)
        for name in ready[:count]:
            self.groups[name].state, self.groups[name].step = "claimed", step
        self.claims[step] = (version, self.refused_pending, ready[:count])
        self.refused_pending = 0
        return self.claims[step]

    def mark_trained(self, step: int) -> bool:
        if step not in self.claims:
            return step <= self.committed_step
        for name in self.claims[step][2]:
            self.groups[name].state = "trained"
        return True

    def commit(self, step: int) -> int | None:
        due = [item for item in sorted(self.claims) if item <= step]
        names = [name for item in due for name in self.claims[item][2]]
        if any(self.groups[name].state != "trained" for name in names):
            return None
        for name in names:
            self.groups[name].state = "committed"
            self.stream.remove(name)
        for item in due:
            self.steps[item] = self.claims.pop(item)[2]
            self.committed_step = item
        return len(due)

    def rewind(self, step: int, reissue: bool) -> list[int] | None:
        if step < self.committed_step:
            if not reissue or step < self.base_step:
                return None
            lost = [name for item in list(self.steps) if item > step for name in self.steps.pop(item)]
            lost += [name for item in list(self.claims) for name in self.claims.pop(item)[2]]
            for name in lost:
                self.give_back(self.groups[name])
            self.committed_step = step
            return []
        if step > max([self.committed_step, *self.claims]):
            return None
        for item, (_, _, names) in self.claims.items():
            for name in names:
                self.groups[name].state = "trained" if item <= step else "claimed"
        return [item for item in sorted(self.claims) if item > step]

    def restored(self) -> LedgerModel:
        """What a ledger restored from a snapshot of this one is."""
        after = copy.deepcopy(self)
        after.base_step = self.committed_step
        for group in list(after.groups.values()):
            if group.state == "trained":
                after.committed_step = max(after.committed_step, group.step)
            elif group.state in ("committed", "dropped"):
                after.settled_before[group.reason or "committed"] += 1
                del after.groups[group.group_id]
            elif group.state != "dead":
                group.state, group.attempt = "waiting", group.attempt + 1
        trained = [
            item for item in after.claims if all(self.groups[n].state == "trained" for n in after.claims[item][2])
        ]
        after.steps = {item: after.claims[item][2] for item in trained}
        for group in after.in_state("trained"):
            group.state = "committed"
        after.claims, after.stream, after.refused_pending = {}, [], 0
        return after
