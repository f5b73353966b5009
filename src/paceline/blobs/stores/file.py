"""Blobs as files under the run's folder, or under any folder that rollout and trainer share."""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline import arrays
from paceline.api.common.v1.array_pb2 import Array, BlobReference
from paceline.blobs.stores.base import Owner
from paceline.config.base import StrictModel
from paceline.files import flush
from paceline.ids import GroupId, check_name, new_id
from paceline.plugins import registry
from paceline.rpc import errors

_FOLDER = re.compile(r"(e[0-9]+\.[0-9]+)-([1-9][0-9]*)")
_DIGEST_IN_NAME = 16


@registry("blob_store").register("file")
class File:
    """One folder an owner, one file a blob; the name of a file holds a part of its checksum. See BlobStore.

    A file is written beside its place, flushed, and renamed. References are relative to the root, so that it may be
    mounted in different places.
    """

    class Options(StrictModel):
        """Options of the file store."""

        root: str = ""
        """Folder for the blobs of all runs, on a disk that rollout and trainer share or in memory (/dev/shm/...);
        empty means the run's own folder."""

    def __init__(self, options: Options, run_directory: Path, run_id: str) -> None:
        check_name(run_id, "run_id")
        own = run_directory.absolute() / "blobs"
        if options.root:
            # Two runs of one name in two folders must not meet.
            mark = hashlib.sha256(str(run_directory.absolute()).encode()).hexdigest()[:12]
            own = Path(options.root).absolute() / f"{run_id}-{mark}"
        self.root = own

    def put(self, owner: Owner, name: str, array: np.ndarray) -> BlobReference:
        """See BlobStore.put."""
        message = arrays.to_wire(array)
        digest = hashlib.sha256(message.data).hexdigest()
        folder = self._folder(owner)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / check_name(f"{name}.{digest[:_DIGEST_IN_NAME]}", "blob")
        partial = folder / f".{new_id()}.partial"
        try:
            partial.write_bytes(message.data)
            flush(partial)
            partial.replace(path)
            flush(folder)
        except FileNotFoundError as error:
            raise errors.Aborted(f"blob {name} of {owner}: its folder was removed, the attempt is over") from error
        except OSError:
            partial.unlink(missing_ok=True)
            raise
        return BlobReference(
            uri=f"{folder.name}/{path.name}", sha256=digest, dtype=message.dtype, shape=list(message.shape)
        )

    def get(self, reference: BlobReference, what: str) -> np.ndarray:
        """See BlobStore.get."""
        folder, _, name = reference.uri.partition("/")
        try:
            if not _FOLDER.fullmatch(folder):
                raise ValueError(f"{folder!r} is no owner")
            path = self.root / folder / check_name(name, "blob")
        except ValueError as error:
            raise errors.DataLoss(f"{what}: blob {reference.uri!r} is no blob of this store: {error}") from error
        try:
            data = path.read_bytes()
        except OSError as error:
            raise errors.DataLoss(
                f"{what}: blob {path} cannot be read: {error.strerror}; do rollout and trainer have the same "
                "run directory and rollout.blobs?"
            ) from error
        found = hashlib.sha256(data).hexdigest()
        if found != reference.sha256:
            raise errors.DataLoss(
                f"{what}: blob {path} has the checksum {found[:12]}, its reference says {reference.sha256[:12]}"
            )
        try:
            return arrays.from_wire(Array(data=data, dtype=reference.dtype, shape=reference.shape), f"blob {path}")
        except ValueError as error:
            raise errors.DataLoss(f"{what}: {error}") from error

    def owners(self) -> Sequence[Owner]:
        """See BlobStore.owners."""
        names = (_FOLDER.fullmatch(path.name) for path in self.root.iterdir()) if self.root.is_dir() else ()
        return [Owner(match[1], int(match[2])) for match in names if match]

    def remove(self, owner: Owner) -> None:
        """See BlobStore.remove."""
        shutil.rmtree(self._folder(owner), ignore_errors=True)

    def _folder(self, owner: Owner) -> Path:
        return self.root / f"{GroupId.parse(owner.group_id)}-{owner.attempt}"
