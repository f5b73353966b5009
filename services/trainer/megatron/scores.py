"""Log-probabilities of tokens whose vocabulary, or whose sequence, several ranks share; logits exist in chunks only."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

from services.trainer.model.logprobs import token_scores

_CHUNK_ELEMENTS = {"cpu": 2**23, "cuda": 2**28}
"""Logits that one rank holds at once, by kind of device."""


def vocabulary_scores(
    hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor, rows: int, group: Any, entropy_gradient: bool = False
) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy (nat) under softmax(factor * hidden @ head.T): two [N].

    Results are float32, or float64 for float64 inputs; the softmax is computed in that type.
    hidden [N, D] is the same on all ranks of `group`; head has a rank's `rows` rows of the vocabulary, the last rank
    fewer; targets int64 [N]. The gradient of hidden is that of the rank's rows, and is to be summed over ranks.
    """
    if group.size() == 1:
        scores = token_scores(hidden, head, targets, factor, None, entropy_gradient)
        return scores.logprobs, scores.entropy
    own = targets - rows * group.rank()
    found = _SharedScores.apply(hidden, head, own, factor.to(_softmax_type(hidden)), rows, group, entropy_gradient)
    return found  # type: ignore[return-value]


def over_context(local: Tensor, index: Tensor, total: int, group: Any) -> Tensor:
    """[total] on every context rank, from each rank's entries `index`. The gradient of an entry goes to its rank.

    Every rank computes the same from the result, so that gradients are not added up.
    """
    if group.size() == 1:
        return local.new_zeros(total).index_put((index,), local)
    return _OverContext.apply(local, index, total, group)  # type: ignore[return-value]


class _OverContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: Tensor, index: Tensor, total: int, group: Any) -> Tensor:
        ctx.save_for_backward(index)
        whole = local.new_zeros(total)
        whole[index] = local
        dist.all_reduce(whole, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return gradients[0].index_select(0, index), None, None, None


class _SharedScores(torch.autograd.Function):
    """Logits are computed again in the backward pass. Source of the split softmax: Megatron-LM, arXiv:1909.08053."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor, rows: int, group: Any,
        entropy_gradient: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        count = len(hidden)
        logprobs, entropy, normalizers = (factor.new_empty(count) for _ in range(3))
        for part in _parts(count, rows, head.device):
            logits = _logits(hidden[part], head, factor[part])
            top = logits.amax(1)
            dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
            shares = (logits - top.unsqueeze(1)).exp_()
            sums = torch.stack([shares.sum(1), (shares * logits).sum(1), _of_target(logits, targets[part])])
            dist.all_reduce(sums, group=group)
            normalizers[part] = sums[0].log() + top
            entropy[part] = normalizers[part] - sums[1] / sums[0]
            logprobs[part] = sums[2] - normalizers[part]
        ctx.save_for_backward(hidden, head, targets, factor, normalizers, entropy)
        ctx.rows, ctx.entropy_gradient = rows, entropy_gradient
        if not entropy_gradient:
            ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden, head, targets, factor, normalizers, entropy = ctx.saved_tensors
        incoming, of_entropy = gradients
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=factor.dtype) if ctx.needs_input_grad[1] else None
        for part in _parts(len(hidden), ctx.rows, head.device):
            shares = _logits(hidden[part], head, factor[part]).sub_(normalizers[part].unsqueeze(1))
            scale = -incoming[part].unsqueeze(1)
            if ctx.entropy_gradient:
                scale = scale - of_entropy[part].unsqueeze(1) * (shares + entropy[part].unsqueeze(1))
            gradient = shares.exp_().mul_(scale)
            which, columns = _own(targets[part], len(head))
            gradient[which, columns] += incoming[part][which]
            gradient = gradient.mul_(factor[part].unsqueeze(1)).to(head.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ head
            if grad_head is not None:
                grad_head += gradient.T @ hidden[part]
        return grad_hidden, None if grad_head is None else grad_head.to(head.dtype), None, None, None, None, None


def _parts(count: int, rows: int, device: torch.device) -> Iterator[slice]:
    size = max(1, _CHUNK_ELEMENTS.get(device.type, 2**23) // rows)
    for start in range(0, count, size):
        yield slice(start, start + size)


def _softmax_type(hidden: Tensor) -> torch.dtype:
    return torch.float64 if hidden.dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, head: Tensor, factor: Tensor) -> Tensor:
    return linear(hidden, head).to(factor.dtype).mul_(factor.unsqueeze(1))


def _own(targets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Which targets are among a rank's rows, and at which of them."""
    chosen = ((targets >= 0) & (targets < rows)).nonzero().squeeze(1)
    return chosen, targets[chosen]


def _of_target(logits: Tensor, targets: Tensor) -> Tensor:
    """The target's logit where this rank has it, else 0."""
    rows, columns = _own(targets, logits.shape[1])
    found = logits.new_zeros(len(logits))
    found[rows] = logits[rows, columns]
    return found
