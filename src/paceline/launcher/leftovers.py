"""Published weights in memory whose run was killed: found by the locks that its launcher and its processes held."""

from __future__ import annotations

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from paceline.launcher.lock import is_locked
from paceline.weights.transports import shm

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Leftover:
    """A folder of weights that no process serves."""

    path: Path
    run_directory: Path
    num_bytes: int


def find(memory: Path | None = None) -> list[Leftover]:
    """Folders of ours in memory whose run's launcher has gone and which no process holds.

    What does not say to which run it belongs, and what belongs to another user of the machine, is left out.
    """
    found = (_look(path) for path in sorted((memory or shm.MEMORY).glob("paceline-*")))
    return [item for item in found if item is not None]


def unmarked(memory: Path | None = None) -> list[Path]:
    """Folders of ours in memory that do not say to which run they belong, so that only a person can know."""
    return [path for path in sorted((memory or shm.MEMORY).glob("paceline-*")) if shm.owner(path) is None]


def _look(path: Path) -> Leftover | None:
    run_directory = shm.owner(path)
    try:
        if run_directory is None or path.is_symlink() or path.stat().st_uid != os.geteuid():
            return None
        if is_locked(run_directory) or shm.in_use(path):
            return None
        return Leftover(path, run_directory, sum(item.stat().st_size for item in path.rglob("*") if item.is_file()))
    except OSError:
        return None  # somebody else removes it just now, or may not be asked


def remove(memory: Path | None = None) -> list[Leftover]:
    """Remove what `find` finds and return it."""
    removed = []
    for item in find(memory):
        try:
            shutil.rmtree(item.path)
        except OSError as error:
            log.warning("%s of the run in %s stays: %s", item.path, item.run_directory, error)
        else:
            removed.append(item)
    return removed
