"""Checkpoints on disk: a directory each, whole or not there, with the digest of every part in its manifest."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.rpc import errors
from paceline.rpc.checks import checked_name
from services.trainer.disk import Disk

log = logging.getLogger(__name__)

FORMAT = 2
MANIFEST = "manifest.json"
_STEP_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint."""

    directory: Path
    step: int
    weight_version: int
    digest: str
    """SHA-256 of the manifest file, which holds the digests of all parts."""
    meta: dict[str, Any]
    """What the trainer wrote beside the parts: config digest, record of the step."""

    def file(self, name: str) -> Path:
        """Path of a part."""
        return self.directory / name

    def json(self, name: str) -> Any:
        """A part that is JSON."""
        return json.loads(self.file(name).read_bytes())


def step_name(step: int) -> str:
    """Directory name of a step's checkpoint."""
    return f"step-{step:06d}"


class CheckpointStore:
    """The checkpoints of a run under one directory; `latest` is a relative link to the newest.

    Write order: parts into a hidden directory (the ranks' by the ranks), sync, manifest, rename, link, then removal of
    the oldest. Whatever is interrupted leaves every earlier checkpoint as it was.
    """

    def __init__(self, root: Path, keep: int, disk: Disk | None = None) -> None:
        self.root = root
        self._keep = keep
        self._disk = disk or Disk()

    def stage(self, name: str) -> Path:
        """A new hidden directory that the ranks fill; `publish` makes it the checkpoint of that name."""
        stage = self.root / f".stage-{name}"
        shutil.rmtree(stage, ignore_errors=True)
        self._disk.make_directory(stage)
        return stage

    def abandon(self, name: str) -> None:
        """Remove what was staged under a name."""
        shutil.rmtree(self.root / f".stage-{name}", ignore_errors=True)

    def publish_step(
        self, step: int, weight_version: int, parts: Mapping[str, bytes], meta: Mapping[str, Any]
    ) -> Checkpoint:
        """Make the staged directory the checkpoint of a step, and remove all but the newest `keep`."""
        name = step_name(step)
        checkpoint = self.publish(name, step, weight_version, parts, meta)
        self._disk.link(name, self.root / "latest")
        for old in self._step_directories()[self._keep :]:
            self._disk.remove(old)
        return checkpoint

    def publish(
        self, name: str, step: int, weight_version: int, parts: Mapping[str, bytes], meta: Mapping[str, Any]
    ) -> Checkpoint:
        """Add `parts` to what was staged under a name and publish it. One that has the name already is replaced."""
        stage = self.root / f".stage-{name}"
        for part, data in parts.items():
            self._disk.write(stage / part, data)
        manifest = {
            "format": FORMAT, "step": step, "weight_version": weight_version, "parts": self._seal(stage, parts),
            "meta": dict(meta),
        }  # fmt: skip
        text = json.dumps(manifest, indent=1, sort_keys=True).encode()
        self._disk.write(stage / MANIFEST, text)
        self._disk.sync_directory(stage)
        target = self.root / name
        if target.exists():
            self._disk.remove(target)
        self._disk.rename(stage, target)
        return Checkpoint(target, step, weight_version, hashlib.sha256(text).hexdigest(), dict(meta))

    def _seal(self, stage: Path, synced: Mapping[str, bytes]) -> list[dict[str, Any]]:
        """Make everything in the stage durable, and list it with its digests."""
        listed = []
        for path in sorted(stage.rglob("*")):
            if path.is_dir():
                self._disk.sync_directory(path)
                continue
            name = path.relative_to(stage).as_posix()
            if name not in synced:
                self._disk.sync_file(path)
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            listed.append({"name": name, "num_bytes": path.stat().st_size, "sha256": digest})
        return listed

    def newest(self) -> Checkpoint | None:
        """The newest whole step checkpoint; torn ones are named in the log and skipped. None when there is none."""
        for directory in self._step_directories():
            try:
                return self.open(directory.name)
            except errors.DataLoss as error:
                log.warning("skipping a torn checkpoint: %s", error)
        return None

    def open(self, name: str) -> Checkpoint:
        """A checkpoint by name, every part verified. NotFound lists what there is; DataLoss names the torn part."""
        directory = self.root / checked_name(name, "checkpoint")
        if not directory.is_dir():
            names = sorted(item.name for item in self.root.glob("[!.]*") if item.name != "latest")
            raise errors.NotFound(f"no checkpoint {name!r}; there are: {', '.join(names) or 'none'}")
        manifest, digest = _read_manifest(directory)
        for part in manifest["parts"]:
            _verify(directory / part["name"], part["num_bytes"], part["sha256"])
        return Checkpoint(directory, manifest["step"], manifest["weight_version"], digest, manifest["meta"])

    def _step_directories(self) -> list[Path]:
        if not self.root.is_dir():
            return []
        found = [item for item in self.root.iterdir() if _STEP_NAME.fullmatch(item.name) and item.is_dir()]
        return sorted(found, key=lambda item: int(item.name.removeprefix("step-")), reverse=True)


def _read_manifest(directory: Path) -> tuple[dict[str, Any], str]:
    path = directory / MANIFEST
    try:
        text = path.read_bytes()
        manifest = json.loads(text)
        if manifest["format"] != FORMAT:
            raise errors.DataLoss(f"{path}: this is format {manifest['format']!r}, and {FORMAT} is what is read")
        _ = manifest["step"], manifest["weight_version"], manifest["parts"], manifest["meta"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise errors.DataLoss(f"{path} is torn: {type(error).__name__}: {error}") from error
    return manifest, hashlib.sha256(text).hexdigest()


def _verify(path: Path, num_bytes: int, sha256: str) -> None:
    try:
        size = path.stat().st_size
        if size != num_bytes:
            raise errors.DataLoss(f"{path} has {size} bytes, its manifest says {num_bytes}")
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise errors.DataLoss(f"{path} cannot be read: {error.strerror}") from error
    if found != sha256:
        raise errors.DataLoss(f"{path} has SHA-256 {found}, its manifest says {sha256}")
