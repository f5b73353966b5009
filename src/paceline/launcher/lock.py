"""One launcher a run folder: a lock that the kernel releases however its holder ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from paceline.config import ConfigError


def lock_directory(directory: Path) -> IO[str]:
    """Hold the run's folder until the returned file is closed. ConfigError when another launcher holds it."""
    directory.mkdir(parents=True, exist_ok=True)
    file = (directory / ".lock").open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"the run in {directory} is up already; `paceline status {directory}` shows it, and Ctrl-C where it was "
            "started ends it. For a second run choose another run.name"
        ) from error
    return file
