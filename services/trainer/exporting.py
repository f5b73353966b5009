"""The final model folder of a run: there whole, with a marker that says so, or not there."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from paceline.files import EXPORT_MARKER
from services.trainer.backends.base import TrainBackend
from services.trainer.disk import Disk


def export_run(backend: TrainBackend, target: Path, step: int, weight_version: int, disk: Disk | None = None) -> Path:
    """Export the policy into `target`, replacing an earlier export, and return it. Runs in the torch thread.

    The marker lists every file with its SHA-256; a folder without it is not a whole export.
    """
    disk = disk or Disk()
    stage = target.with_name(f".stage-{target.name}")
    shutil.rmtree(stage, ignore_errors=True)
    disk.make_directory(stage)
    backend.export(stage)
    files = []
    for path in sorted(stage.iterdir()):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        files.append({"name": path.name, "num_bytes": path.stat().st_size, "sha256": digest})
        disk.sync_file(path)
    marker = {"complete": True, "step": step, "weight_version": weight_version, "files": files}
    disk.write(stage / EXPORT_MARKER, json.dumps(marker, indent=1).encode())
    disk.sync_directory(stage)
    if target.exists():
        disk.remove(target)
    disk.rename(stage, target)
    return target
