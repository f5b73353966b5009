"""Versions as directories of files under the run's folder, or any folder that trainer and engines share."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from paceline.config.base import StrictModel
from paceline.files import flush
from paceline.ids import check_name, new_id
from paceline.plugins import registry
from paceline.rpc import errors
from paceline.weights.manifest import FILE_NAME

_PUBLISHED = re.compile(r"v([0-9]{8,})")


@registry("transport").register("disk")
class Disk:
    """Full snapshots on a file system. Files are flushed to the disk before a version becomes visible."""

    class Options(StrictModel):
        """Options of the disk transport."""

        root: str = ""
        """Folder for the versions of all runs; empty means the run's own folder."""

    durable = True

    def __init__(self, options: Options, run_directory: Path, run_id: str) -> None:
        check_name(run_id, "run_id")
        root = Path(options.root).absolute() / run_id if options.root else run_directory.absolute() / "weights"
        self.root = root
        self._stages: set[Path] = set()

    def stage(self, weight_version: int) -> Path:
        """A new empty directory under the root. ValueError for a version below 1."""
        path = self.root / f".stage-{self._name(weight_version)}-{new_id()[:8]}"
        path.mkdir(parents=True)
        self._stages.add(path)
        return path

    def publish(self, stage: Path, weight_version: int) -> str:
        """Rename the stage into place. FailedPrecondition when it is no stage or holds no manifest."""
        if stage not in self._stages or not (stage / FILE_NAME).is_file():
            raise errors.FailedPrecondition(f"{stage} is not a stage of this transport that holds a {FILE_NAME}")
        if self.durable:
            for path in [*stage.iterdir(), stage]:
                flush(path)
        target = self.root / self._name(weight_version)
        replaced = None
        if target.exists():
            replaced = self.root / f".replaced-{target.name}-{new_id()[:8]}"
            target.rename(replaced)
        stage.rename(target)
        if self.durable:
            flush(self.root)
        self._stages.discard(stage)
        if replaced is not None:
            shutil.rmtree(replaced)
        return str(target)

    def open(self, uri: str) -> Path:
        """The directory of a version. A uri that leaves the root, also by a link, is InvalidArgument."""
        path = Path(uri)
        if path.parent != self.root or not _PUBLISHED.fullmatch(path.name) or path.is_symlink():
            raise errors.InvalidArgument(
                f"uri {uri!r} is not a version under {self.root}; do trainer and engine "
                "have the same run directory and weights.transport?"
            )
        if not (path / FILE_NAME).is_file():
            raise errors.NotFound(f"weight version at {uri} is gone; it was collected or lost, take the newest one")
        return path

    def collect(self, keep: set[int]) -> list[int]:
        """Remove versions not in `keep`, in ascending order, and what other stages or replacements left behind."""
        removed = []
        for path in sorted(self.root.iterdir()) if self.root.is_dir() else []:
            match = _PUBLISHED.fullmatch(path.name)
            if match is None and path.name.startswith((".stage-", ".replaced-")) and path not in self._stages:
                shutil.rmtree(path, ignore_errors=True)
            elif match is not None and int(match[1]) not in keep and not path.is_symlink():
                shutil.rmtree(path)
                removed.append(int(match[1]))
        if not keep and self.root.is_dir() and not any(self.root.iterdir()):
            self.root.rmdir()
        return sorted(removed)

    @staticmethod
    def _name(weight_version: int) -> str:
        if weight_version < 1:
            raise ValueError(f"weight version {weight_version} is not one; versions start at 1")
        return f"v{weight_version:08d}"
