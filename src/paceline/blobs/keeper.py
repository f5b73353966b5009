"""The life of blobs: written by rollout before a group is put, read by the trainer, removed by what the ledger says.

The ledger is what owns them. A blob is needed while the attempt that wrote it is the present one of a group that is
being generated, buffered, claimed, or trained by a step that no checkpoint has. Whoever finds it otherwise may remove
it, so that nothing depends on a process living long enough to clean up after itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from paceline.api.common.v1.array_pb2 import BlobReference
from paceline.blobs.stores.base import BlobStore, Owner
from paceline.ledger import Ledger
from paceline.rpc import errors
from paceline.samples import Sample, SampleGroup

log = logging.getLogger(__name__)


class BlobKeeper:
    """The blobs of a run's groups."""

    def __init__(self, store: BlobStore, ledger: Ledger) -> None:
        self._store = store
        self._ledger = ledger

    async def write(self, group: SampleGroup) -> None:
        """Put what is attached to the samples into the store; they get the references.

        ResourceExhausted when there is no room: the attempt may be made again later.
        """
        owner = Owner(group.group_id, group.attempt)
        for number, sample in enumerate(group.samples):
            for name, array in sample.attached.items():
                try:
                    reference = await _finished(self._store.put, owner, f"{number}.{name}", array)
                except OSError as error:
                    await self.remove(group.group_id, group.attempt)
                    raise errors.ResourceExhausted(
                        f"sample {sample.sample_id}: its {name} cannot be written: {error.strerror}", 1.0
                    ) from error
                sample.blobs[name] = reference

    async def read(self, groups: Sequence[SampleGroup]) -> None:
        """Attach to the samples what they refer to. DataLoss names sample and blob."""
        for group in groups:
            for sample in group.samples:
                for name, reference in sample.blobs.items():
                    sample.attached[name] = await asyncio.to_thread(self._get, sample, name, reference)

    async def remove(self, group_id: str, attempt: int) -> None:
        """Remove what one attempt wrote."""
        await _finished(self._store.remove, Owner(group_id, attempt))

    async def sweep(self) -> int:
        """Remove all that nobody needs, whoever left it; how many owners there were.

        FailedPrecondition, and nothing is removed, while there is no ledger. What is written meanwhile is safe: owners
        are listed first, and the ledger knows an attempt before it is made.
        """
        owners = await asyncio.to_thread(self._store.owners)
        attempts = await self._ledger.live_attempts(sorted({owner.group_id for owner in owners})) if owners else {}
        over = [owner for owner in owners if attempts.get(owner.group_id) != owner.attempt]
        for owner in over:
            await _finished(self._store.remove, owner)
        return len(over)

    def _get(self, sample: Sample, name: str, reference: BlobReference) -> Any:
        return self._store.get(reference, f"sample {sample.sample_id}, {name}")


async def _finished(work: Callable[..., Any], *arguments: Any) -> Any:
    """The result of `work` in a thread, which has ended also when this is cancelled: no write may come afterwards."""
    task: Awaitable[Any] = asyncio.ensure_future(asyncio.to_thread(work, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])  # type: ignore[list-item]
        raise
