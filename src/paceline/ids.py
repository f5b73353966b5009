"""Names that identify things in a run. Every name that becomes a path or a Redis key is checked here."""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_GROUP = re.compile(r"e(0|[1-9][0-9]*)\.(0|[1-9][0-9]*)")


def check_name(value: str, what: str) -> str:
    """Return `value` when it is safe as a folder name and a key; else ValueError names it and the rule."""
    if not _NAME.fullmatch(value) or ".." in value:
        raise ValueError(
            f"{what} {value!r} must start with a letter or digit and hold at most 100 letters, digits, '.', '_', '-'"
        )
    return value


def redis_prefix(run_id: str, owner: str) -> str:
    """Prefix of the Redis keys that one part of the system keeps for a run; ValueError when the run id is no name.

    The braces keep a run in one slot of a Redis cluster.
    """
    return f"paceline:{{{check_name(run_id, 'run id')}}}:{owner}:"


@dataclass(frozen=True, order=True)
class GroupId:
    """`e<epoch>.<index>`: the index-th prompt of an epoch. Sorts in the order of the data."""

    epoch: int
    index: int

    @classmethod
    def parse(cls, text: str) -> GroupId:
        match = _GROUP.fullmatch(text)
        if match is None:
            raise ValueError(f"group id {text!r} is not of the form e<epoch>.<index>, as in e0.17")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"e{self.epoch}.{self.index}"


def sample_id(group_id: str, sibling: int) -> str:
    """Id of the sibling-th sample of a group."""
    return f"{group_id}/{sibling}"


def sample_seed(run_seed: int, group_id: str, sibling: int) -> int:
    """The 63-bit seed of a sample: the same in every attempt, on every machine."""
    return derived_seed(f"{run_seed}/{group_id}/{sibling}")


def derived_seed(text: str) -> int:
    """A 63-bit seed that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def new_id() -> str:
    """A fresh random id: incarnations and idempotency keys."""
    return uuid.uuid4().hex
