"""Versions as files in the memory of one host: the quickest way between processes that share it.

Memory outlives whoever filled it. So the folder says which run it belongs to, and whoever writes or reads it holds it
by a lock that the kernel releases; what nobody holds any more can be told from what is in use.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
from pathlib import Path

from paceline.plugins import registry
from paceline.weights.transports.disk import Disk

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")
_OWNER = ".run_directory"


@registry("transport").register("shm")
class Shm(Disk):
    """Full snapshots under /dev/shm; under the run's folder, with a warning, where the system has no such place."""

    class Options(Disk.Options):
        """Options of the shm transport."""

        root: str = ""
        """Folder of a memory file system; empty means /dev/shm."""

    durable = False

    def __init__(self, options: Options, run_directory: Path, run_id: str) -> None:
        super().__init__(Disk.Options(), run_directory, run_id)
        self._run_directory = run_directory.absolute()
        self._held: int | None = None
        memory = Path(options.root).absolute() if options.root else MEMORY
        self._in_memory = memory.is_dir() and os.access(memory, os.W_OK)
        if not self._in_memory:
            log.warning("%s is not a folder that can be written; weights go to %s instead", memory, self.root)
            return
        # Two runs of one name in two folders must not meet, whichever machine user started them.
        mark = hashlib.sha256(str(self._run_directory).encode()).hexdigest()[:12]
        self.root = memory / f"paceline-{run_id}-{mark}"

    def stage(self, weight_version: int) -> Path:
        """As Disk; the folder is held from now on until the process ends or collects everything."""
        self._hold(make=True)
        return super().stage(weight_version)

    def open(self, uri: str) -> Path:
        """As Disk; the folder is held from now on until the process ends."""
        self._hold(make=False)
        return super().open(uri)

    def collect(self, keep: set[int]) -> list[int]:
        """As Disk; when nothing is to be kept the folder goes too."""
        if not keep and self._in_memory:
            (self.root / _OWNER).unlink(missing_ok=True)
            self.release()
        return super().collect(keep)

    def release(self) -> None:
        """Hold the folder no longer. The end of the process does the same."""
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def _hold(self, make: bool) -> None:
        while self._in_memory and not self._holds():
            if make:
                self.root.mkdir(parents=True, exist_ok=True)
            try:
                folder = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
            except FileNotFoundError:
                if not make:
                    return
                continue
            fcntl.flock(folder, fcntl.LOCK_SH)
            self.release()
            self._held = folder
        if make and self._in_memory:
            (self.root / _OWNER).write_text(str(self._run_directory))

    def _holds(self) -> bool:
        """Whether what is held is still the folder, and not one that was removed meanwhile."""
        try:
            return self._held is not None and os.path.samestat(os.fstat(self._held), os.stat(self.root))
        except FileNotFoundError:
            return False


def owner(folder: Path) -> Path | None:
    """The folder of the run that a folder in memory belongs to; None when it does not say."""
    try:
        return Path((folder / _OWNER).read_text())
    except OSError:
        return None


def in_use(folder: Path) -> bool:
    """Whether a trainer or an engine holds the folder now."""
    try:
        held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        return True
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(held)
    return False
