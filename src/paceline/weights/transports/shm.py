"""Versions as files in the memory of one host: the quickest way between processes that share it."""

from __future__ import annotations

import hashlib
import logging
import os
from pathlib import Path

from paceline.plugins import registry
from paceline.weights.transports.disk import Disk

log = logging.getLogger(__name__)

MEMORY = Path("/dev/shm")


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
        memory = Path(options.root).absolute() if options.root else MEMORY
        if not (memory.is_dir() and os.access(memory, os.W_OK)):
            log.warning("%s is not a folder that can be written; weights go to %s instead", memory, self.root)
            return
        # Two runs of one name in two folders must not meet, whichever machine user started them.
        mark = hashlib.sha256(str(run_directory.absolute()).encode()).hexdigest()[:12]
        self.root = memory / f"paceline-{run_id}-{mark}"
