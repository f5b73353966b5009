"""What a weight transport must do: hold published versions where the trainer and the engines both reach them."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol


class Transport(Protocol):
    """One place for published versions. One trainer writes, any number of engines read.

    A plug-in of kind "transport" is a class with a nested `Options` and `__init__(options, run_directory, run_id)`. One
    that holds versions in memory sets `durable = False`: the launcher then collects all of them at the end of a run.
    """

    def stage(self, weight_version: int) -> Path:
        """A new empty directory to write a version into; nobody reads it before `publish`."""
        ...

    def publish(self, stage: Path, weight_version: int) -> str:
        """Make a staged directory that holds a manifest readable under the returned uri, whole or not at all.

        Publishing a version again replaces it: the bytes are equal, but those of before may have been lost.
        """
        ...

    def open(self, uri: str) -> Path:
        """The directory behind a uri.

        Raises:
            InvalidArgument: the uri is not a version of this transport.
            NotFound: the version is not there: collected, or lost with the machine's memory.
        """
        ...

    def collect(self, keep: set[int]) -> list[int]:
        """Remove every published version that is not in `keep`, and left-over stages; returns the removed versions."""
        ...
