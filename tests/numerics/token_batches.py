"""Random token batches in float64, and gradients by finite differences that respect stop-gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from services.trainer.token_batch import TokenBatch

LENGTHS = (5, 7, 4, 6, 3, 8)
"""Tokens of each sequence, masked ones included; the last two sequences are a group of their own."""
GROUPS = (0, 0, 0, 0, 1, 1)
SIGNS = (1.0, -1.0, 1.0, -1.0, 1.0, -1.0)
TOPK = 3
NOT_TOKENS = ("num_sequences", "group_of_sequence")


def make_batch(seed: int = 0, token_advantages: bool = False) -> TokenBatch:
    """Six sequences in two groups, in a shuffled order of tokens; about a fifth of the tokens are masked."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(LENGTHS)

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return torch.randn(count, generator=generator, dtype=torch.float64) * scale + shift

    index = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    index = index[torch.randperm(count, generator=generator)]
    behaviour = normal(0.5, -2.0)
    weights = torch.rand(count, generator=generator, dtype=torch.float64) + 0.1
    weights[::5] = 0.0
    size = torch.rand(len(LENGTHS), generator=generator, dtype=torch.float64) + 0.2
    advantages = (torch.tensor(SIGNS, dtype=torch.float64) * size)[index]
    topk = torch.randn(2, count, TOPK + 2, generator=generator, dtype=torch.float64).log_softmax(-1)[..., :TOPK]
    return TokenBatch(
        policy_logprobs=(behaviour + normal(0.4)).requires_grad_(), weights=weights,
        advantages=normal(1.0) if token_advantages else advantages, sampler_logprobs=behaviour + normal(0.3),
        behaviour_logprobs=behaviour, reference_logprobs=behaviour + normal(0.3), sequence_index=index,
        num_sequences=len(LENGTHS), group_of_sequence=torch.tensor(GROUPS), entropy=normal(0.2, 1.0).requires_grad_(),
        values=normal(1.0), returns=normal(1.0), teacher_logprobs=behaviour + normal(0.5),
        teacher_topk_logprobs=topk[0], policy_topk_logprobs=topk[1].clone().requires_grad_(),
    )  # fmt: skip


def part_of(batch: TokenBatch, sequences: list[int]) -> TokenBatch:
    """The micro-batch of some of the sequences, numbered anew."""
    index = batch.sequences
    chosen = torch.isin(index, torch.tensor(sequences))
    renumbered = torch.tensor([sequences.index(int(item)) for item in index[chosen]], dtype=torch.long)
    taken = {
        item.name: getattr(batch, item.name)[chosen]
        for item in fields(batch)
        if item.name not in NOT_TOKENS and getattr(batch, item.name) is not None
    }
    taken["sequence_index"] = renumbered
    return TokenBatch(**taken, num_sequences=len(sequences), group_of_sequence=batch.groups[torch.tensor(sequences)])


def poisoned(batch: TokenBatch) -> TokenBatch:
    """The same batch with NaN, infinities and huge numbers in every masked entry of every field."""
    values = torch.tensor([math.nan, math.inf, -math.inf, math.nan, 1e300], dtype=torch.float64)
    masked = batch.weights == 0
    changes: dict[str, Any] = {}
    for item in fields(batch):
        tensor = getattr(batch, item.name)
        if item.name in (*NOT_TOKENS, "weights", "sequence_index") or tensor is None:
            continue
        clone = tensor.detach().clone()
        count = int(masked.sum())
        noise = values.repeat(count)[:count].reshape(-1, *[1] * (clone.ndim - 1))
        clone[masked] = noise.expand(count, *clone.shape[1:])
        changes[item.name] = clone.requires_grad_(tensor.requires_grad)
    return replace(batch, **changes)


class HeldDetached(TorchFunctionMode):
    """Records what `detach` gave in the first call of a function, and gives the same in all later ones."""

    def __init__(self) -> None:
        super().__init__()
        self._recorded: list[Tensor] = []
        self._next: int | None = None

    def replay(self) -> None:
        """From here on, from the first one again."""
        self._next = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not Tensor.detach:
            return func(*args, **(kwargs or {}))
        if self._next is None:
            found = func(*args)
            self._recorded.append(found.clone())
            return found
        self._next += 1
        return self._recorded[self._next - 1].clone()


def finite_differences(function: Callable[[Tensor], Tensor], point: Tensor, step: float = 1e-6) -> Tensor:
    """Central differences of a scalar function, with everything that it detaches held as it is at the point."""
    held = HeldDetached()
    with held:
        function(point)
    gradient = torch.zeros_like(point).flatten()
    for place in range(point.numel()):
        sides = []
        for sign in (1, -1):
            moved = point.clone().flatten()
            moved[place] += sign * step
            with held:
                held.replay()
                sides.append(function(moved.reshape(point.shape)).item())
        gradient[place] = (sides[0] - sides[1]) / (2 * step)
    return gradient.reshape(point.shape)
