"""The model's forward passes: prompts into slots, one token of every row, logits to the sampler."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence as SequenceOf
from itertools import pairwise

import numpy as np
import torch

from services.engine.embedded.attention import DecodeBatch, PrefillBatch
from services.engine.embedded.cache import STEP, KeyValueCache, padded
from services.engine.embedded.packed import PackedLinears, Product, product
from services.engine.embedded.prefixes import LANES, Fill, PrefixTable
from services.engine.embedded.routing import RoutingRecorder
from services.engine.embedded.sampler import Drawn, Draws, Sampler
from services.engine.embedded.scheduler import Sequence

MIN_ROWS = 8
"""Batches are padded to multiples of this many rows: then a row's result does not depend on how many there are."""

HEAD_PIECE = 2048
"""Rows of the output embedding that are multiplied at once."""


class Decoder:
    """Runs a transformers model over the cache. All calls come from one thread."""

    def __init__(
        self,
        model: torch.nn.Module,
        capacity: int,
        max_length: int,
        prefill_tokens: int,
        device: torch.device,
        packed_from: int = 0,
        recorder: RoutingRecorder | None = None,
    ) -> None:
        self.model = model
        self.device = device
        self.dtype = next(model.parameters()).dtype
        self.cache = KeyValueCache(capacity + 1, padded(capacity, MIN_ROWS), max_length)
        self.spare_slot = capacity
        self._prefill_tokens = prefill_tokens
        self._packed_from = packed_from
        self._packed = PackedLinears(model, packed_from)
        self._sampler = Sampler(0, device)
        self.rebind()
        self._hidden: list[torch.Tensor | None] = [None] * (capacity + 1)
        self._recorder = recorder
        self._routing: list[np.ndarray | None] = [None] * (capacity + 1)
        self._places = torch.arange(self.cache.max_length, device=device)

    @torch.no_grad()
    def rebind(self) -> None:
        """Look up the model's parts and pack its weights again: modules were replaced, or weights have changed."""
        self._packed.refresh()
        self._body: torch.nn.Module = self.model.get_decoder()  # type: ignore[operator]
        self._head: torch.nn.Module = self.model.get_output_embeddings()  # type: ignore[operator]
        weight: torch.Tensor = self._head.weight  # type: ignore[assignment]
        if weight.shape[0] != self._sampler.vocabulary:
            self._sampler = Sampler(weight.shape[0], self.device)
        # In pieces that stay in the CPU's cache: much faster than one product for a large vocabulary.
        self._head_pieces: list[tuple[int, int, Product]] | None = None
        if type(self._head) is torch.nn.Linear and self._head.bias is None and self.device.type == "cpu":
            edges = [*range(0, weight.shape[0], HEAD_PIECE), weight.shape[0]]
            self._head_pieces = [
                (first, last, product(weight[first:last], self._packed_from)) for first, last in pairwise(edges)
            ]

    @torch.inference_mode()
    def fill(self, fills: SequenceOf[Fill]) -> None:
        """Compute, or copy, the prompts of slots."""
        buckets: dict[int, list[Fill]] = defaultdict(list)
        for item in fills:
            if item.source is None:
                buckets[padded(len(item.token_ids))].append(item)
        for length, items in sorted(buckets.items()):
            size = max(1, self._prefill_tokens // length)
            for first in range(0, len(items), size):
                self._prefill(items[first : first + size], length)
        for item in fills:
            if item.source is not None:
                self.move_slot(item.source, item.slot, len(item.token_ids))

    def move_slot(self, source: int, target: int, length: int) -> None:
        """Copy a prompt to another slot."""
        self.cache.copy_prefix(source, target, length)
        self._hidden[target] = self._hidden[source]
        self._routing[target] = self._routing[source]

    @torch.inference_mode()
    def draw_first(self, sequences: SequenceOf[Sequence]) -> Drawn:
        """Sample the token after the prompt for sequences whose slots are filled."""
        slots = list(dict.fromkeys(item.slot for item in sequences))
        row_of = {slot: row for row, slot in enumerate(slots)}
        states = [self._hidden[slot] for slot in slots]
        states += [states[0]] * (padded(len(states), MIN_ROWS) - len(states))
        scores = self._score(torch.stack(states))  # type: ignore[arg-type]
        for item in sequences:
            found = self._routing[item.slot]
            if found is not None and item.ticket.request.with_routing:
                # Of a retracted sequence only the last token had not been read before.
                item.add_routing(found[item.num_routed :])
        rows = self._tensor([row_of[item.slot] for item in sequences])
        return self._sampler.draw(scores.index_select(0, rows), self._draws(sequences, len(sequences)))

    @torch.inference_mode()
    def step(self, sequences: SequenceOf[Sequence], prefixes: PrefixTable) -> Drawn:
        """Feed the last token of each row and sample the next; `sequences[i]` is row i."""
        rows = padded(len(sequences), MIN_ROWS)
        extra = [0] * (rows - len(sequences))
        tokens = self._tensor([item.generated[-1] for item in sequences] + extra)
        positions = self._tensor([item.position - 1 for item in sequences] + extra)
        hidden = self._run(tokens[:, None], positions[:, None], self._batch(sequences, prefixes, extra))
        routing = self._recorder.take(rows) if self._recorder is not None else None
        drawn = self._sampler.draw(self._score(hidden[:, 0]), self._draws(sequences, rows))
        for row, item in enumerate(sequences):
            item.own_length += 1
            if routing is not None and item.ticket.request.with_routing:
                item.add_routing(routing[row])
        return drawn

    @torch.inference_mode()
    def probe(self) -> int:
        """One greedy token of a one-token prompt, in a slot kept free for it."""
        self._prefill([Fill(self.spare_slot, [0])], STEP)
        return int(self.logits_of(self.spare_slot).argmax())

    def logits_of(self, slot: int) -> torch.Tensor:
        """Logits [vocabulary] after the prompt of a filled slot."""
        state = self._hidden[slot]
        assert state is not None
        return self._score(torch.stack([state] * MIN_ROWS))[0, : self._sampler.vocabulary].clone()

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states [rows, hidden size] in the sampler's float32 buffer."""
        scores = self._sampler.scores(len(hidden))
        if self._head_pieces is None:
            scores[:, : self._sampler.vocabulary].copy_(self._head(hidden))
            return scores
        for first, last, multiply in self._head_pieces:
            scores[:, first:last].copy_(multiply(hidden))
        return scores

    def _prefill(self, items: SequenceOf[Fill], length: int) -> None:
        ids = torch.zeros((len(items), length), dtype=torch.int64)
        for row, item in enumerate(items):
            ids[row, : len(item.token_ids)] = torch.tensor(item.token_ids)
        slots = self._tensor([item.slot for item in items])
        hidden = self._run(ids.to(self.device), self._places[None, :length], PrefillBatch(self.cache, slots))
        for row, item in enumerate(items):
            self._hidden[item.slot] = hidden[row, len(item.token_ids) - 1].clone()
        if self._recorder is not None:
            routing = self._recorder.take(len(items))
            for row, item in enumerate(items):
                self._routing[item.slot] = routing[row, : len(item.token_ids)].copy()

    def _run(self, ids: torch.Tensor, positions: torch.Tensor, batch: PrefillBatch | DecodeBatch) -> torch.Tensor:
        if self._recorder is not None:
            self._recorder.begin()
        output = self._body(input_ids=ids, position_ids=positions, use_cache=False, paceline_batch=batch)
        return output.last_hidden_state

    def _batch(self, sequences: SequenceOf[Sequence], prefixes: PrefixTable, extra: list[int]) -> DecodeBatch:
        slots = prefixes.extent
        own = [item.own_length for item in sequences] + extra
        lanes = [item.slot * LANES + item.lane for item in sequences]
        lane_rows = [0] * (slots * LANES)
        for row, lane in enumerate(lanes):
            lane_rows[lane] = row
        lengths = [max(1, prefixes.length(slot)) for slot in range(slots)]
        places = self._tensor(own)
        return DecodeBatch(
            self.cache,
            torch.arange(len(own), device=self.device),
            places,
            self._tensor(lane_rows),
            self._tensor(lanes + extra),
            self._mask(self._tensor(lengths), max(lengths)),
            self._mask(places + 1, max(own) + 1),
        )

    def _mask(self, lengths: torch.Tensor, longest: int) -> torch.Tensor:
        """0 for the first `lengths` [n] places and -inf after, [n, 1, 1, padded longest]."""
        visible = self._places[None, : padded(longest)] < lengths[:, None]
        mask = torch.zeros(visible.shape, dtype=self.dtype, device=self.device).masked_fill_(~visible, float("-inf"))
        return mask[:, None, None]

    def _draws(self, sequences: SequenceOf[Sequence], rows: int) -> Draws:
        extra = rows - len(sequences)
        sampling = [item.ticket.request.sampling for item in sequences]
        draws = Draws(
            self._tensor([_signed(item.seed) for item in sequences] + [0] * extra),
            self._tensor([item.position for item in sequences] + [0] * extra),
            num_top=max(item.ticket.request.num_top_logprobs for item in sequences),
        )
        if any(item.temperature != 1 for item in sampling):
            draws.temperature = self._tensor([item.temperature for item in sampling] + [1.0] * extra, torch.float32)
        if any(item.top_k > 0 for item in sampling):
            draws.top_k = self._tensor([item.top_k for item in sampling] + [0] * extra)
        if any(item.top_p < 1 for item in sampling):
            draws.top_p = self._tensor([item.top_p for item in sampling] + [1.0] * extra, torch.float32)
        return draws

    def _tensor(self, values: SequenceOf[float], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)


def _signed(seed: int) -> int:
    """The int64 with the bits of a uint64."""
    return seed - (1 << 64) if seed >= 1 << 63 else seed
