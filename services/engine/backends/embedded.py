"""The embedded backend: a transformers model in this process, batched continuously, on a CPU or one GPU."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import torch
from pydantic import Field

from paceline.config import StrictModel
from paceline.config.services import EngineConfig
from paceline.plugins import registry
from paceline.rpc import errors
from paceline.tokenizer import Detokenizer, Tokenizer
from services.engine.embedded.decoder import Decoder
from services.engine.embedded.loop import DecodeLoop, Event
from services.engine.embedded.model import load_model, plug_attention
from services.engine.embedded.routing import RoutingRecorder
from services.engine.embedded.scheduler import Ticket, open_ticket
from services.engine.embedded.stop import StopWatch
from services.engine.embedded.weights import ModelWeights, read_publication
from services.engine.generation import AppliedWeights, Load, PauseMode, Piece, Request

log = logging.getLogger(__name__)


class EmbeddedGeneration:
    """Pieces of one request as the decode thread hands them over."""

    def __init__(self, ticket: Ticket, owner: Embedded) -> None:
        self.ticket = ticket
        self.queue: asyncio.Queue[Event | None] = asyncio.Queue()
        self.left_queue = False
        self._owner = owner

    @property
    def admitted_time(self) -> float | None:
        return self.ticket.admitted_time

    async def __aiter__(self) -> AsyncIterator[Sequence[Piece]]:
        num_open = len(self.ticket.request.seeds)
        while num_open:
            event = await self.queue.get()
            if event is None:
                raise errors.Unavailable("engine is stopping; ask another engine by the same seeds", 0.2)
            if event.error is not None:
                raise event.error
            num_open -= sum(piece.finish is not None for piece in event.pieces)
            if event.pieces:
                yield event.pieces

    def cancel(self) -> None:
        self._owner.cancel(self.ticket)


@registry("engine_backend").register("embedded")
class Embedded:
    """See services.engine.backends.base.EngineBackend. `config` is [engine], `model_path` the base model's folder."""

    class Options(StrictModel):
        """[engine.backend] of name "embedded"."""

        prefill_tokens: int = Field(default=4096, ge=32)
        """Most prompt tokens of one forward pass; fewer keep running requests from waiting on long prompts."""
        packed_from: int = Field(default=100_000, ge=0)
        """On a CPU, weights of at least so many elements are also kept in the layout of its matrix kernels, which costs
        their memory a second time and gives a fifth to a half more speed. 0: none."""
        hold_seconds: float = Field(default=120.0, gt=0)
        """How long a weight update waits for requests that it may not interrupt before it ends them."""

    def __init__(self, options: Options, config: EngineConfig, model_path: str) -> None:
        self._options = options
        self._config = config
        self._model_path = model_path
        self._open: dict[str, EmbeddedGeneration] = {}
        self._num_waiting = 0
        self.vocabulary = 0
        self.records_routing = config.record_routing
        self._loaded = self._closed = False

    @property
    def weight_version(self) -> int:
        return self._loop.weight_version if self._loaded else 0

    async def load(self) -> None:
        self._events = asyncio.get_running_loop()
        await asyncio.to_thread(self._load)
        self._loop.start()
        self._loaded = True

    def _load(self) -> None:
        config = self._config
        torch.set_num_threads(config.threads)
        model = load_model(self._model_path, config.dtype, config.device, config.max_sequence_length)
        self._tokenizer = Tokenizer.load(self._model_path)
        self._decoder = Decoder(
            model, config.max_sequences, config.max_sequence_length, self._options.prefill_tokens,
            torch.device(config.device), self._options.packed_from,
            RoutingRecorder(model, self._model_path) if config.record_routing else None,
        )  # fmt: skip
        plug_attention(model, self._decoder)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self._weights = ModelWeights(model)
        self._loop = DecodeLoop(self._decoder, config.max_sequences, self._emit)

    def serve_base_weights(self) -> None:
        """Call the loaded base model version 1: for benchmarks and tests, which have nobody to publish."""
        self._loop.weight_version = 1

    async def watch(self) -> None:
        await asyncio.wrap_future(self._loop.ended)

    def submit(self, request: Request) -> EmbeddedGeneration:
        if request.request_id in self._open:
            raise errors.AlreadyExists(f"request_id {request.request_id!r} is running on this engine")
        if self._num_waiting >= self._config.max_waiting:
            raise errors.ResourceExhausted(
                f"engine queue is full: {self._num_waiting} requests wait (engine.max_waiting = "
                f"{self._config.max_waiting}); try again, or add engines", self._retry_delay()
            )  # fmt: skip
        generation = EmbeddedGeneration(open_ticket(request, self._watch), self)
        self._open[request.request_id] = generation
        self._num_waiting += 1
        self._loop.submit(generation.ticket)
        return generation

    def cancel(self, ticket: Ticket) -> None:
        """Drop a request whose caller is gone; one that has ended is left alone."""
        if self._open.get(ticket.request.request_id) is not None and ticket.num_open:
            self._loop.post(lambda: self._loop.cancel(ticket))

    async def abort(self, request_ids: Sequence[str] | None) -> int:
        return await asyncio.wrap_future(self._loop.post(lambda: self._loop.abort(request_ids)))

    async def apply(self, directory: Path, weight_version: int, mode: PauseMode) -> AppliedWeights:
        publication = await asyncio.to_thread(read_publication, directory, weight_version)

        def install() -> None:
            if self._weights.swap(publication):
                self._decoder.rebind()

        swapped = self._loop.swap(weight_version, mode, install, self._options.hold_seconds)
        seconds = await asyncio.wrap_future(swapped)
        digest = await asyncio.to_thread(self._weights.digest, publication)
        return AppliedWeights(digest, seconds)

    async def pause(self, mode: PauseMode, deadline_seconds: float) -> int:
        return await asyncio.wrap_future(self._loop.pause(mode, deadline_seconds))

    async def resume(self) -> None:
        await asyncio.wrap_future(self._loop.post(self._loop.resume))

    async def probe(self) -> int:
        def answer() -> int:
            self._decoder.probe()
            return self._loop.weight_version

        return await asyncio.wrap_future(self._loop.post(answer))

    def load_numbers(self) -> Load:
        scheduler, capacity = self._loop.scheduler, self._config.max_sequences
        running = len(scheduler.running) + len(scheduler.retracted)
        rows = list(scheduler.running)
        tokens = sum(item.own_length for item in rows)
        room = capacity * self._config.max_sequence_length
        return Load(
            running,
            self._num_waiting,
            capacity,
            self._loop.rate.per_second(),
            min(1.0, tokens / room),
            self._loop.held_by(),
            self._loop.num_generated,
            self._loop.busy_seconds,
        )

    async def close(self) -> None:
        self._closed = True
        for generation in self._open.values():
            generation.queue.put_nowait(None)
        if self._loaded:
            await asyncio.to_thread(self._loop.stop)

    def _watch(self, request: Request) -> StopWatch:
        return StopWatch(request.sampling, self._tokenizer.eos_token_ids, Detokenizer(self._tokenizer))

    def _retry_delay(self) -> float:
        """About how long until a place in the queue is free, at the present rate."""
        rate = self._loop.rate.per_second()
        return min(10.0, max(0.2, 32.0 * self._config.max_sequences / rate / 8)) if rate else 1.0

    def _emit(self, events: list[Event]) -> None:
        """In the decode thread."""
        if not self._closed:
            self._events.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            request_id = event.ticket.request.request_id
            generation = self._open.get(request_id)
            if generation is None or generation.ticket is not event.ticket:
                continue
            if (event.admitted or event.closed) and not generation.left_queue:
                generation.left_queue = True
                self._num_waiting -= 1
            if event.closed:
                del self._open[request_id]
            generation.queue.put_nowait(event)
