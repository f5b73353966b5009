"""What a blob store must do: hold the arrays of samples where rollout writes and the trainer reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from paceline.api.common.v1.array_pb2 import BlobReference


@dataclass(frozen=True)
class Owner:
    """Whose blobs: those of one attempt at a group live and go together. A group's attempts only go up."""

    group_id: str
    attempt: int


class BlobStore(Protocol):
    """The store of one run, for any number of processes. OSError where there is no room.

    A plug-in of kind "blob_store" is a class with a nested `Options` and `__init__(options, run_directory, run_id)`.
    """

    def put(self, owner: Owner, name: str, array: np.ndarray) -> BlobReference:
        """Keep an array, whole or not at all, until its owner is removed. `name` tells it from the owner's others.

        Aborted when the owner was removed meanwhile.
        """
        ...

    def get(self, reference: BlobReference, what: str) -> np.ndarray:
        """The array, read-only. DataLoss names `what` and the blob when it is gone or does not have its checksum."""
        ...

    def owners(self) -> Sequence[Owner]:
        """All that have anything here, unfinished writes included."""
        ...

    def remove(self, owner: Owner) -> None:
        """Remove everything of an owner; nothing when there is nothing."""
        ...
