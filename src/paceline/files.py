"""Files that a crash leaves whole: the one place that knows how to replace one and how to flush one."""

from __future__ import annotations

import os
from pathlib import Path

EXPORT_MARKER = "paceline-export.json"
"""In an exported model's folder: a folder without it is not whole."""


def replace(path: Path, text: str) -> None:
    """Give a file new content, whole or not at all: flushed beside it, then renamed over it."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def flush(path: Path) -> None:
    """Make durable what was written to a file, or which names a directory holds."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
