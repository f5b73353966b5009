"""What layouts of backend megatron find out on every rank besides training; see parity_probes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from parity import PROBES

TOKENS, WIDTH, VOCABULARY = 9, 16, 50


def vocabulary_check(backend: Any, world: Any) -> dict[str, float]:
    """Log-probabilities, entropies and gradients over a shared vocabulary, against those of the whole one: errors.

    The vocabulary is no multiple of the rows of a rank.
    """
    from services.trainer.megatron import scores
    from services.trainer.model.logprobs import token_scores

    scores._CHUNK_ELEMENTS["cpu"] = 64  # several chunks
    random = torch.Generator().manual_seed(5)
    vocabulary, rows = VOCABULARY - 1, -(-VOCABULARY // world.size)
    hidden, head = (torch.randn(count, WIDTH, generator=random).double() for count in (TOKENS, vocabulary))
    targets = torch.randint(vocabulary, (TOKENS,), generator=random)
    factor = torch.rand(TOKENS, generator=random).double() + 0.5
    pull = torch.randn(2, TOKENS, generator=random).double()
    whole = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    own = slice(world.rank * rows, (world.rank + 1) * rows)
    part = hidden.clone().requires_grad_(), head[own].clone().requires_grad_()
    wanted = token_scores(*whole, targets, factor, None, True)
    found = scores.vocabulary_scores(*part, targets, factor, rows, backend.replica.layout.tensor.group, True)
    (wanted.logprobs * pull[0] + wanted.entropy * pull[1]).sum().backward()
    (found[0] * pull[0] + found[1] * pull[1]).sum().backward()
    gradients = [item.grad for item in (*whole, *part)]
    dist.all_reduce(gradients[2])
    gaps = {
        "logprobs": found[0] - wanted.logprobs, "entropy": found[1] - wanted.entropy,
        "hidden": gradients[2] - gradients[0], "head": gradients[3] - gradients[1][own],
    }  # fmt: skip
    return {name: float(gap.detach().abs().max()) for name, gap in gaps.items()}


PROBES["tensor"] = vocabulary_check
