"""Draws tokens so that each depends on its own row, seed and position only.

The noise is a hash of (seed, position), not a generator's state: the same sample comes out whatever else is in the
batch, on every attempt. Drawing is by inverse distribution function, in two levels, so that the vocabulary is read few
times.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

_BLOCK = 256
_GAMMA = -0x61C8864680B583EB  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15))


def _mix(state: torch.Tensor) -> torch.Tensor:
    """The finalizer of splitmix64 on int64 tensors; torch's integer products wrap as unsigned ones do."""
    for shift, factor in _MIX:
        state = (state ^ _shift(state, shift)) * factor
    return state ^ _shift(state, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right of int64."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def uniform(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """float64 [n] in (0, 1) from int64 seeds [n] and positions [n]; 40 random bits each."""
    mixed = _mix(_mix(seeds + _GAMMA) + positions * _GAMMA)
    return (_shift(mixed, 24).double() + 0.5) * 2.0**-40


@dataclass
class Draws:
    """How each row is drawn. Tensors of [n]; None where no row asks for it."""

    seeds: torch.Tensor
    positions: torch.Tensor
    temperature: torch.Tensor | None = None
    """float32; 0 is greedy. None: all 1."""
    top_k: torch.Tensor | None = None
    """int64; 0 is off."""
    top_p: torch.Tensor | None = None
    """float32; 1 is off."""
    num_top: int = 0
    """Most probable tokens to return for each row."""


@dataclass
class Drawn:
    """Tokens int64 [n], log-probabilities float32 [n], and the most probable tokens [n, num_top] when asked for."""

    tokens: torch.Tensor
    logprobs: torch.Tensor
    top_tokens: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


class Sampler:
    """Draws from scores in buffers that it keeps, because fresh pages for a large vocabulary are dear."""

    def __init__(self, vocabulary: int, device: torch.device) -> None:
        self.vocabulary = vocabulary
        self._device = device
        self._padded = -(-vocabulary // _BLOCK) * _BLOCK
        self._scores = self._weights = torch.empty((0, self._padded), device=device)

    def scores(self, rows: int) -> torch.Tensor:
        """A float32 buffer [rows, padded vocabulary] to write logits into; columns past the vocabulary are -inf."""
        if len(self._scores) < rows:
            shape = (rows, self._padded)
            self._scores = torch.full(shape, float("-inf"), device=self._device)
            self._weights = torch.empty(shape, device=self._device)
        return self._scores[:rows]

    def draw(self, scores: torch.Tensor, draws: Draws) -> Drawn:
        """Sample one token a row of `scores`, which came from `scores()`, or has its shape, and is overwritten.

        The log-probability is over the whole vocabulary at the sampling temperature (at 1 for greedy rows), whether or
        not top_k and top_p cut the choice.
        """
        greedy = None
        if draws.temperature is not None:
            greedy = draws.temperature == 0
            scores.div_(torch.where(greedy, 1.0, draws.temperature)[:, None])
        peak = scores.amax(-1, keepdim=True)
        flat = self._weights[: len(scores)] if len(self._weights) >= len(scores) else torch.empty_like(scores)
        weights = torch.sub(scores, peak, out=flat).exp_().view(len(scores), -1, _BLOCK)
        sums = weights.sum(-1)
        log_total = _log(sums.double().sum(-1)).float()
        kept = _cut(scores, weights, draws, log_total, peak)
        if kept is not weights:
            sums = kept.sum(-1)
        tokens = _invert(kept, sums, uniform(draws.seeds, draws.positions))
        if greedy is not None:
            tokens = torch.where(greedy, scores.argmax(-1), tokens)
        logprobs = scores.gather(-1, tokens[:, None])[:, 0] - peak[:, 0] - log_total
        drawn = Drawn(tokens, logprobs)
        if draws.num_top:
            top, drawn.top_tokens = scores.topk(min(draws.num_top, self.vocabulary), -1)
            drawn.top_logprobs = top - peak - log_total[:, None]
        return drawn


def draw(logits: torch.Tensor, draws: Draws) -> Drawn:
    """Sample one token a row of logits [n, vocabulary] of any float type; see Sampler.draw."""
    sampler = Sampler(logits.shape[1], logits.device)
    scores = sampler.scores(len(logits))
    scores[:, : logits.shape[1]].copy_(logits)
    return sampler.draw(scores, draws)


def _invert(weights: torch.Tensor, sums: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Index at which the running sum of weights [n, blocks, _BLOCK] passes the share `noise` [n] of the total."""
    rows = torch.arange(len(weights), device=weights.device)
    outer = sums.double().cumsum(-1)
    target = noise[:, None] * outer[:, -1:]
    block = torch.searchsorted(outer, target, right=True).clamp_(max=sums.shape[1] - 1)
    below = outer.gather(-1, block) - sums.double().gather(-1, block)
    block = block[:, 0]
    inner = weights[rows, block].double().cumsum(-1)
    share = (target - below) / sums[rows, block].double()[:, None]
    within = torch.searchsorted(inner, share * inner[:, -1:], right=True)
    # Rounding may point past the last token that can be drawn; that token is then meant.
    last = torch.searchsorted(inner, inner[:, -1:].contiguous())
    return block * _BLOCK + torch.minimum(within, last)[:, 0]


def _log(values: torch.Tensor) -> torch.Tensor:
    """Logarithm of [n], each as if there were many: a CPU takes another log for what is left over of a vector."""
    return values[:, None].expand(-1, 32).contiguous().log()[:, 0]


def _cut(
    scores: torch.Tensor, weights: torch.Tensor, draws: Draws, log_total: torch.Tensor, peak: torch.Tensor
) -> torch.Tensor:
    """Weights with the tokens beyond top_k and top_p set to 0; the same object when no row asks for either."""
    if draws.top_k is None and draws.top_p is None:
        return weights
    ordered, order = scores.sort(stable=True, dim=-1, descending=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if draws.top_k is not None:
        rank = torch.arange(ordered.shape[1], device=scores.device)
        keep &= (rank[None] < draws.top_k[:, None]) | (draws.top_k[:, None] == 0)
    if draws.top_p is not None:
        share = (ordered - peak - log_total[:, None]).exp_()
        share = torch.where(keep, share, 0.0)
        share /= share.sum(-1, keepdim=True)
        before = share.double().cumsum(-1) - share
        keep &= (before < draws.top_p[:, None]) | (draws.top_p[:, None] >= 1)
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return torch.where(kept.view_as(weights), weights, 0.0)
