"""What every rank but the first does: the calls that rank 0 gets, until it says stop or is gone."""

from __future__ import annotations

import logging

from services.trainer.backends.base import TrainBackend
from services.trainer.ranks.commands import decode
from services.trainer.ranks.leader import STOP
from services.trainer.ranks.together import EXPECTED, RankFailed, together
from services.trainer.ranks.world import World

log = logging.getLogger(__name__)


def follow(backend: TrainBackend, world: World) -> None:
    """Serve rank 0. A lost connection, and any error that is not expected, ends this rank with its traceback."""
    while True:
        call, arguments = decode(world.broadcast(None))
        if call == STOP:
            return
        try:
            together(world, lambda: getattr(backend, call)(*arguments))  # noqa: B023  called at once
        except EXPECTED as error:
            log.warning("rank %d: %s: %s", world.rank, call, error)
        except RankFailed as error:
            log.warning("%s: %s", call, error)
