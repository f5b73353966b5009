"""Forward and backward passes of a stage over micro-batches, by megatron-core's schedules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from services.trainer.megatron.model import Stage
from services.trainer.megatron.stream import Stream

Score = Callable[[int, Tensor, Tensor], Tensor]
"""(number of the micro-batch, log-probabilities [N], entropy [N]) -> the sum of its losses, on the last stage."""


def train(stage: Stage, model: Any, streams: Sequence[Stream], score: Score, entropy_gradient: bool) -> None:
    """Add the gradients of `score` to those that wait. `model` is the wrapped model of the stage."""
    _run(stage, model, streams, score, entropy_gradient, forward_only=False)


@torch.no_grad()
def logprobs(stage: Stage, streams: Sequence[Stream]) -> list[Tensor]:
    """Of every predicted token of each micro-batch, [N]; on other stages than the last an empty list."""
    found: list[Tensor] = []

    def keep(number: int, values: Tensor, entropy: Tensor) -> Tensor:
        found.append(values)
        return values.new_zeros(())

    _run(stage, stage.model, streams, keep, False, forward_only=True)
    return found


def _run(
    stage: Stage, model: Any, streams: Sequence[Stream], score: Score, entropy_gradient: bool, forward_only: bool
) -> None:
    if not streams:
        return

    def forward(numbered: Iterator[tuple[int, Stream]], part: Any) -> tuple[Tensor, Any]:
        number, stream = next(numbered)

        def loss(hidden: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            total = score(number, *stage.scores(hidden, stream, entropy_gradient))
            return total, torch.zeros((), dtype=torch.int), {}

        return stage.run(part, stream), loss

    get_forward_backward_func()(
        forward_step_func=forward, data_iterator=iter(enumerate(streams)), model=[model],
        num_microbatches=len(streams), seq_length=len(streams[0].token_ids), micro_batch_size=1,
        forward_only=forward_only,
    )  # fmt: skip
