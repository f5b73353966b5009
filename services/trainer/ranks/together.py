"""One piece of work on all ranks: it succeeded everywhere, or every rank knows that it did not."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from paceline.config import ConfigError
from paceline.rpc.errors import PacelineError
from services.trainer.datum import InvalidDatum
from services.trainer.ranks.world import World

log = logging.getLogger(__name__)

T = TypeVar("T")

EXPECTED = (PacelineError, ConfigError, InvalidDatum, OSError, ValueError)
"""Errors that leave a rank able to go on: what was asked for cannot be had. All others end the rank."""

PATIENCE = timedelta(seconds=20)
"""How long a rank that failed waits for the others to come to the same end; then it ends, and with it the trainer."""


class RankFailed(RuntimeError):
    """Another rank could not do what this one could; the text has its number and its error."""


def together(world: World, work: Callable[[], T]) -> T:
    """The result of `work` once it succeeded on all ranks.

    An expected error is raised where it happened. Where only others failed, an OSError is raised as one with the same
    number (a full disk is waited out), anything else as RankFailed.
    """
    if world.size == 1:
        return work()
    try:
        result = work()
    except EXPECTED as error:
        _exchange(world, error)
        raise
    failed = {rank: told for rank, told in enumerate(_exchange(world, None)) if told}
    for rank, told in failed.items():
        if told.get("errno") is not None:
            raise OSError(told["errno"], f"{told['text']} (on rank {rank})")
        raise RankFailed(f"rank {rank}: {told['text']}")
    return result


def _exchange(world: World, error: Exception | None) -> list[dict]:
    """What each rank says of its end. A rank without an error waits for as long as the others work."""
    if error is not None:
        reached = torch.ones(1)
        work = dist.all_reduce(reached, group=world.control, async_op=True)
        if work is not None and not _done(work):
            log.error("the other ranks did not end within %.0f s of this error", PATIENCE.total_seconds())
            raise error
    else:
        dist.all_reduce(torch.ones(1), group=world.control)
    told = {} if error is None else {"text": f"{type(error).__name__}: {error}", "errno": getattr(error, "errno", None)}
    return [json.loads(part) for part in world.gather(json.dumps(told).encode())]


def _done(work: dist.Work) -> bool:
    try:
        return bool(work.wait(PATIENCE))
    except RuntimeError:
        return False
