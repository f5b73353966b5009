"""Log-probabilities of chosen tokens without ever holding all logits: the vocabulary is visited in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**29}
"""Logits held at once by kind of device: a few times 32 MiB that fit a cache, or a few times 1 GiB for few launches."""


@dataclass(frozen=True)
class TokenScores:
    """What one visit of the vocabulary gives for N positions. float32, or float64 for float64 inputs."""

    logprobs: Tensor
    """[N]: of the targets."""
    entropy: Tensor
    """[N], in nat."""
    chosen: Tensor
    """[N, k]: of the ids that were asked for; k is 0 when there were none."""


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy (nat, no gradient) under softmax(factor * hidden @ head.T).

    hidden [N, D] and head [V, D] in one dtype, targets int64 [N], factor [N] (logit scale / temperature). Results are
    float32 [N], or float64 for float64 inputs; the softmax is computed in that type.
    """
    scores = token_scores(hidden, head, targets, factor)
    return scores.logprobs, scores.entropy


def token_scores(
    hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor, chosen: Tensor | None = None,
    entropy_gradient: bool = False,
) -> TokenScores:  # fmt: skip
    """As token_logprobs, with the log-probabilities of the ids `chosen` (int64 [N, k]), which carry a gradient.

    The entropy carries one when `entropy_gradient` says so.
    """
    ids = targets.new_empty(len(targets), 0) if chosen is None else chosen
    return TokenScores(*_TokenScores.apply(hidden, head, targets, factor, ids, entropy_gradient))  # type: ignore[misc]


@torch.no_grad()
def top_logprobs(hidden: Tensor, head: Tensor, factor: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Ids (int64) and log-probabilities of the k likeliest tokens at each position, likeliest first: two [N, k]."""
    kind = _softmax_type(hidden.dtype)
    ids = torch.empty(len(hidden), k, dtype=torch.long, device=hidden.device)
    logprobs = hidden.new_empty(len(hidden), k, dtype=kind)
    if k == 0:
        return ids, logprobs
    for part in _parts(len(hidden), head):
        logits = _logits(hidden[part], head, factor[part].to(kind))
        values, ids[part] = logits.topk(k, dim=1)
        logprobs[part] = values - logits.logsumexp(1, keepdim=True)
    return ids, logprobs


def _parts(count: int, head: Tensor) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS.get(head.device.type, 2**23) // head.shape[0])
    for start in range(0, count, size):
        yield slice(start, start + size)


def _softmax_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, head: Tensor, factor: Tensor) -> Tensor:
    return _scaled(linear(hidden, head), factor)


def _scaled(products: Tensor, factor: Tensor) -> Tensor:
    """In the type of the factor, whatever that of the products."""
    return products * factor.unsqueeze(1)


def _visit(products: Tensor, factor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Normalizer [n], entropy [n] and probabilities [n, V] of rows of logits."""
    logits = _scaled(products, factor)
    normalizer = logits.logsumexp(1)
    probabilities = (logits - normalizer.unsqueeze(1)).exp_()
    return normalizer, normalizer - torch.linalg.vecdot(probabilities, logits), probabilities


def _statistics(products: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Without the probabilities, which a fused kernel then never writes."""
    return _visit(products, factor)[:2]


def _probabilities(products: Tensor, factor: Tensor, normalizer: Tensor, scale: Tensor) -> Tensor:
    """scale p, in the type of the products."""
    logits = _scaled(products, factor)
    return logits.sub_(normalizer.unsqueeze(1)).exp_().mul_(scale.unsqueeze(1)).to(products.dtype)


@cache
def _fused(work: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel in place of ten that each read all logits. Only for CUDA: a CPU finds chunks in its cache."""
    return torch.compile(work, dynamic=True)


def _on(device: torch.device, work: Callable[..., Any]) -> Callable[..., Any]:
    return _fused(work) if device.type == "cuda" else work


def _with_targets(scaled: Tensor, targets: Tensor, logprobs: Tensor, scale: Tensor) -> Tensor:
    """scale * (onehot - p) from scale * p, in place; 1 - p of the target keeps its digits where p nears 1.

    `scale` is [n]: factor, times the incoming gradient where it is known.
    """
    of_target = (-logprobs.expm1() * scale).to(scaled.dtype)
    return scaled.neg_().scatter_(1, targets.unsqueeze(1), of_target.unsqueeze(1))


class _TokenScores(torch.autograd.Function):
    """A frozen head needs no second visit: d logprob_t / d hidden_t does not depend on the incoming gradient, so it is
    made in the forward pass and scaled in the backward pass. A trained head is visited again, and so is any when more
    than the targets' log-probabilities has a gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor, chosen: Tensor, entropy_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = _softmax_type(hidden.dtype)
        factor = factor.to(kind)
        logprobs, entropy = hidden.new_empty(len(hidden), dtype=kind), hidden.new_empty(len(hidden), dtype=kind)
        of_chosen = hidden.new_empty(chosen.shape, dtype=kind)
        extra = entropy_gradient or chosen.shape[1] > 0
        direct = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1] and not extra
        jacobian = torch.empty_like(hidden) if direct else None
        normalizers, statistics = torch.empty_like(logprobs), _on(hidden.device, _statistics)
        for part in _parts(len(hidden), head):
            products = linear(hidden[part], head)
            wanted = torch.cat([targets[part].unsqueeze(1), chosen[part]], 1)
            found = products.gather(1, wanted).to(kind) * factor[part].unsqueeze(1)
            scaled: Tensor | None = None
            if jacobian is None:
                normalizers[part], entropy[part] = statistics(products, factor[part])
            else:
                normalizers[part], entropy[part], probabilities = _visit(products, factor[part])
                scaled = probabilities.mul_(factor[part].unsqueeze(1)).to(head.dtype)
            found -= normalizers[part].unsqueeze(1)
            logprobs[part], of_chosen[part] = found[:, 0], found[:, 1:]
            if jacobian is not None and scaled is not None:
                jacobian[part] = _with_targets(scaled, targets[part], logprobs[part], factor[part]) @ head
        if jacobian is not None:
            ctx.save_for_backward(jacobian)
        else:
            ctx.save_for_backward(hidden, head, targets, factor, chosen, entropy, normalizers, logprobs)
        ctx.direct, ctx.entropy_gradient = direct, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy, of_chosen

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        incoming, of_entropy, of_chosen = gradients
        if ctx.direct:
            (jacobian,) = ctx.saved_tensors
            return (jacobian * incoming.unsqueeze(1)).to(jacobian.dtype), None, None, None, None, None
        hidden, head, targets, factor, chosen, entropy, normalizers, logprobs = ctx.saved_tensors
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=factor.dtype) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden), head):
            products = linear(hidden[part], head)
            if ctx.entropy_gradient or chosen.shape[1]:
                gradient = _gradient_of_all(
                    _scaled(products, factor[part]), targets[part], chosen[part], entropy[part], incoming[part],
                    of_chosen[part], of_entropy[part] if ctx.entropy_gradient else None,
                )  # fmt: skip
                gradient = gradient.mul_(factor[part].unsqueeze(1)).to(head.dtype)
            else:
                scale = factor[part] * incoming[part]
                scaled = _on(head.device, _probabilities)(products, factor[part], normalizers[part], scale)
                gradient = _with_targets(scaled, targets[part], logprobs[part], scale)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ head
            if grad_head is not None:
                grad_head += gradient.T @ hidden[part]
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None


def _gradient_of_all(
    logits: Tensor, targets: Tensor, chosen: Tensor, entropy: Tensor, incoming: Tensor, of_chosen: Tensor,
    of_entropy: Tensor | None,
) -> Tensor:  # fmt: skip
    """Gradient of the scaled logits, [n, V].

    g onehot(target) + sum_j g_j onehot(chosen_j) - p (g + sum_j g_j) - g_H p (log p + H), as dH / dz = -p (log p + H).
    """
    logprobs = logits.log_softmax(1)
    factor = (incoming + of_chosen.sum(1)).unsqueeze(1)
    if of_entropy is not None:
        factor = factor + of_entropy.unsqueeze(1) * (logprobs + entropy.unsqueeze(1))
    gradient = logprobs.exp().mul_(factor).neg_()
    gradient.scatter_add_(1, targets.unsqueeze(1), incoming.unsqueeze(1))
    return gradient.scatter_add_(1, chosen, of_chosen)
