"""Log-probabilities of chosen tokens without ever holding all logits: the vocabulary is visited in chunks of tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

_CHUNK_ELEMENTS = 2**23
"""Logits held at once; bounds memory to a few times 32 MiB."""


def token_logprobs(hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probability of `targets` and entropy (nat, no gradient) under softmax(factor * hidden @ head.T).

    hidden [N, D] and head [V, D] in one dtype, targets int64 [N], factor [N] (logit scale / temperature). Results are
    float32 [N], or float64 for float64 inputs; the softmax is computed in that type.
    """
    logprobs, entropy = _TokenLogprobs.apply(hidden, head, targets, factor)  # type: ignore[misc]
    return logprobs, entropy


def _softmax_type(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _logits(hidden: Tensor, head: Tensor, factor: Tensor) -> Tensor:
    logits = linear(hidden, head).to(_softmax_type(hidden.dtype))
    return logits.mul_(factor.unsqueeze(1))


def _gradient_of_logits(probabilities: Tensor, targets: Tensor, scale: Tensor) -> Tensor:
    """scale * (onehot - p), in place. `scale` is [n]: factor, times the incoming gradient where it is known."""
    gradient = probabilities.neg_()
    gradient.scatter_add_(1, targets.unsqueeze(1), torch.ones_like(scale).unsqueeze(1))
    return gradient.mul_(scale.unsqueeze(1))


class _TokenLogprobs(torch.autograd.Function):
    """A frozen head needs no second visit: d logprob_t / d hidden_t does not depend on the incoming gradient, so it is
    made in the forward pass and scaled in the backward pass. A trained head is visited again.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, factor: Tensor) -> tuple[Tensor, Tensor]:
        size = max(1, _CHUNK_ELEMENTS // head.shape[0])
        kind = _softmax_type(hidden.dtype)
        factor = factor.to(kind)
        logprobs, entropy = hidden.new_empty(len(hidden), dtype=kind), hidden.new_empty(len(hidden), dtype=kind)
        direct = ctx.needs_input_grad[0] and not ctx.needs_input_grad[1]
        jacobian = torch.empty_like(hidden) if direct else None
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = _logits(hidden[part], head, factor[part])
            normalizer = logits.logsumexp(1)
            logprobs[part] = logits.gather(1, targets[part].unsqueeze(1)).squeeze(1) - normalizer
            probabilities = (logits - normalizer.unsqueeze(1)).exp_()
            entropy[part] = normalizer - torch.linalg.vecdot(probabilities, logits)
            if jacobian is not None:
                gradient = _gradient_of_logits(probabilities, targets[part], factor[part])
                jacobian[part] = gradient.to(head.dtype) @ head
        if jacobian is not None:
            ctx.save_for_backward(jacobian)
        else:
            ctx.save_for_backward(hidden, head, targets, factor)
        ctx.direct = direct
        ctx.mark_non_differentiable(entropy)
        return logprobs, entropy

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        incoming = gradients[0]
        if ctx.direct:
            (jacobian,) = ctx.saved_tensors
            return (jacobian * incoming.unsqueeze(1)).to(jacobian.dtype), None, None, None
        hidden, head, targets, factor = ctx.saved_tensors
        size = max(1, _CHUNK_ELEMENTS // head.shape[0])
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        grad_head = torch.zeros_like(head, dtype=factor.dtype)
        for start in range(0, len(hidden), size):
            part = slice(start, start + size)
            logits = _logits(hidden[part], head, factor[part])
            scale = factor[part] * incoming[part]
            gradient = _gradient_of_logits(logits.softmax(1), targets[part], scale).to(head.dtype)
            if grad_hidden is not None:
                grad_hidden[part] = gradient @ head
            grad_head += gradient.T @ hidden[part]
        return grad_hidden, grad_head.to(head.dtype), None, None
