"""The few ways in which the trainer changes a disk, each durable when it returns. Tests make it fail in between."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from paceline.files import flush


class Disk:
    """Durable file operations. What is written before a rename is on the disk before the rename."""

    def make_directory(self, path: Path) -> None:
        """A new empty directory."""
        path.mkdir(parents=True)

    def write(self, path: Path, data: bytes) -> None:
        """A new file with `data`, synced."""
        with path.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def rename(self, source: Path, target: Path) -> None:
        """Rename within one file system, atomically; both directories are synced."""
        os.rename(source, target)
        self.sync_directory(target.parent)

    def link(self, target: str, link: Path) -> None:
        """Point the relative symbolic link at `target`, replacing an earlier one atomically."""
        temporary = link.with_name(f".{link.name}.{os.getpid()}")
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        self.rename(temporary, link)

    def remove(self, path: Path) -> None:
        """Remove a directory: renamed out of sight first, so that no half-removed one can be taken for whole."""
        hidden = path.with_name(f".removed-{path.name}")
        shutil.rmtree(hidden, ignore_errors=True)
        os.rename(path, hidden)
        shutil.rmtree(hidden)

    def sync_file(self, path: Path) -> None:
        """Make a file durable that someone else wrote."""
        flush(path)

    def sync_directory(self, path: Path) -> None:
        """Make renames and new names in a directory durable."""
        flush(path)
