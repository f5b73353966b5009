"""What the engine service asks of a model server, so that the gRPC surface and the weight agent know no backend."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Protocol

from services.engine.generation import AppliedWeights, Load, PauseMode, Piece, Request


class Generation(Protocol):
    """One running request: iterate it for pieces; it ends after the finish of its last sample."""

    admitted_time: float | None
    """Unix time at which the first sample left the queue."""

    def __aiter__(self) -> AsyncIterator[Sequence[Piece]]: ...

    def cancel(self) -> None:
        """Free the slots within one decode step. No more pieces follow."""
        ...


class EngineBackend(Protocol):
    """A model server. Errors are paceline.rpc.errors.*; every method is called from the event loop."""

    weight_version: int
    """The version being served; 0 before the first."""
    vocabulary: int
    """Token ids are 0 to this, exclusive; known once loaded."""
    records_routing: bool
    """Whether it can say which experts each token went through."""

    async def load(self) -> None:
        """Make the model ready for weights. ConfigError names what is wrong with the model folder."""
        ...

    def submit(self, request: Request) -> Generation:
        """Queue a request. AlreadyExists for a running id; ResourceExhausted with a delay when the queue is full."""
        ...

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        """End requests (None: all) with what they have; the number of samples that were ended."""
        ...

    async def apply(self, directory: Path, weight_version: int, mode: PauseMode) -> AppliedWeights:
        """Swap to the publication in `directory` between two tokens. On an error the served version stays."""
        ...

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> int:
        """Hold generation until `resume` or the deadline; the number of samples held."""
        ...

    async def resume(self) -> None: ...

    async def probe(self) -> int:
        """Generate one token; the version that did."""
        ...

    async def watch(self) -> None:
        """Return after `close`; raise when the model server died."""
        ...

    def load_numbers(self) -> Load: ...

    async def close(self) -> None: ...
