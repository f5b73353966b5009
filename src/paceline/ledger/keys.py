"""Names of the Redis keys of a run: built here and nowhere else."""

from __future__ import annotations

from paceline.ids import redis_prefix

CONSUMER_GROUP = "trainer"
"""Consumer group of the sample stream."""

PARTS = (
    "meta",  # hash: identity, size, cursor, counters
    "live",  # hash: group id -> record, of groups that are in flight or trained
    "settled",  # hash: the same of committed and dropped groups
    "dead",  # hash: the same of dead groups
    "waiting",  # zset: groups to issue, by their place in the data
    "leases",  # zset: groups being generated, by the Unix time at which the lease ends
    "buffer",  # zset: buffered groups, in the order of their puts
    "versions",  # zset: buffered groups, by oldest weight version
    "claims",  # hash: step -> the claim that it trains
    "steps",  # hash: committed step -> its group ids
    "samples",  # stream: payloads of buffered, claimed and trained groups
    "doorbell",  # stream of one entry: rung by every change
    "openings",  # the same: rung by changes after which more may be issued
    "issues",  # hash: owner -> the last issue, so that a repeated call gets the same groups
)
"""Each part of the ledger is one key."""


def prefix(run_id: str) -> str:
    """Prefix of every key of the run's ledger."""
    return redis_prefix(run_id, "ledger")


def key(run_id: str, part: str) -> str:
    """The key of one part of the run's ledger."""
    if part not in PARTS:
        raise ValueError(f"the ledger has no part {part!r}; parts are {', '.join(PARTS)}")
    return prefix(run_id) + part


def all_keys(run_id: str) -> list[str]:
    """The keys of all parts."""
    return [key(run_id, part) for part in PARTS]


def lua_names() -> str:
    """Lua variables called after the parts, and a function that sets them. The prefix is the one key of every call."""
    names = [part.upper() for part in PARTS]
    lines = [f"local CONSUMERS, PREFIX, {', '.join(names)} = '{CONSUMER_GROUP}', ''", "local function set_keys(prefix)"]
    lines += ["PREFIX = prefix", *(f"{part.upper()} = prefix .. '{part}'" for part in PARTS), "end"]
    return "\n".join(lines)
