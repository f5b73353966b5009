"""The overview of every second, built once and sent to every page that looks, as server-sent events."""

from __future__ import annotations

import asyncio
import json
import logging
import sqlite3
from collections.abc import AsyncIterator

from paceline.config import RunFile
from services.dashboard.overview import RECENT_STEPS, Recent, build, window
from services.dashboard.queries import BusyView, Reader, StepView
from services.dashboard.state import LiveState
from services.dashboard.store import Store
from services.dashboard.views import Overview

log = logging.getLogger(__name__)

SNAPSHOT = "overview"
_SNAPSHOT_EVERY = 10


class Live:
    """Publishes overviews. A page that reconnects with the last id it saw gets every record that it missed."""

    def __init__(
        self, state: LiveState, store: Store, reader: Reader, config: RunFile, every_seconds: float = 1.0
    ) -> None:
        self._state = state
        self._store = store
        self._reader = reader
        self._config = config
        self._every = every_seconds
        self._changed = asyncio.Condition()
        self._serial = 0
        self._closed = False
        self._recent = Recent([], BusyView(samples=0, idle_share=None, tokens_per_second=None), 0)
        self.overview: Overview = self._build()

    async def run(self) -> None:
        """Build and announce an overview every second; every tenth is stored, for when the run has stopped."""
        while True:
            await self.refresh()
            if self._serial % _SNAPSHOT_EVERY == 1:
                await self._save()
            await asyncio.sleep(self._every)

    async def refresh(self) -> None:
        """Build and announce one overview now."""
        try:
            self._recent = await asyncio.to_thread(self._read)
        except (sqlite3.Error, OSError) as error:
            self._state.store_source.failed(str(error))
        self.overview = self._build()
        async with self._changed:
            self._serial += 1
            self._changed.notify_all()

    async def close(self) -> None:
        """End all streams, and store the last overview."""
        await self.refresh()
        async with self._changed:
            self._closed = True
            self._changed.notify_all()
        await self._save()

    async def events(self, after_revision: int) -> AsyncIterator[bytes]:
        """Server-sent events: "overview" and "steps"; "reset" when the page knows records that are not here."""
        sent, serial = after_revision, 0
        if after_revision > await asyncio.to_thread(self._reader.revision):
            yield _event("reset", 0, "{}")
            sent = 0
        while True:
            async with self._changed:
                while self._serial == serial and not self._closed:
                    await self._changed.wait()
            if self._closed:
                return
            serial, overview = self._serial, self.overview
            if overview.revision > sent:
                steps = await asyncio.to_thread(self._reader.steps, sent)
                sent = max([sent, *(step.revision for step in steps)])
                yield _event("steps", sent, steps_json(steps))
            yield _event("overview", sent, overview.model_dump_json())

    def _read(self) -> Recent:
        steps = self._reader.last_steps(RECENT_STEPS)
        return Recent(steps, self._reader.busy(*window(steps)), self._reader.revision())

    def _build(self) -> Overview:
        return build(self._state, self._config, self._recent, self._store.counters)

    async def _save(self) -> None:
        try:
            await self._store.put_snapshot(SNAPSHOT, self.overview.model_dump_json())
        except (sqlite3.Error, TimeoutError) as error:
            log.warning("the overview was not stored: %s", error)


def steps_json(steps: list[StepView]) -> str:
    """A JSON list of step records."""
    return json.dumps([step.model_dump() for step in steps], separators=(",", ":"), allow_nan=False)


def _event(name: str, number: int, data: str) -> bytes:
    return f"event: {name}\nid: {number}\ndata: {data}\n\n".encode()
