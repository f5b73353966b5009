"""One launcher a run folder: a lock that the kernel releases however its holder ends."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import IO

from paceline.config import ConfigError

NAME = ".lock"


def lock_directory(directory: Path) -> IO[str]:
    """Hold the run's folder until the returned file is closed.

    ConfigError when another launcher holds it, or the folder cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = (directory / NAME).open("a")
    except OSError as error:
        raise ConfigError(f"run.directory {directory} cannot be written: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"the run in {directory} is up already; `paceline status {directory}` shows it, and Ctrl-C where it was "
            "started ends it. For a second run choose another run.name"
        ) from error
    return file


def is_locked(directory: Path) -> bool:
    """Whether a launcher holds the folder now. A folder that is not there is not held."""
    try:
        with (directory / NAME).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except BlockingIOError:
        return True
    return False
