"""The tokens of one micro-batch, flat: what every loss, correction and penalty is computed from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TokenBatch:
    """N tokens of S whole sequences. Tensors have shape [N] and one floating dtype where nothing else is said.

    A sequence is one datum; it is never split over micro-batches, and neither is a group (the datums of one prompt).
    """

    policy_logprobs: Tensor
    """Carries the gradient."""
    weights: Tensor
    """Factor of each token in the sum; 0 masks the token, whatever its other values are (NaN included)."""
    advantages: Tensor
    sampler_logprobs: Tensor
    behaviour_logprobs: Tensor
    """Denominator of the ratio."""
    reference_logprobs: Tensor | None = None
    sequence_index: Tensor | None = None
    """int64 [N], 0..S-1: the sequence of each token; None stands for one sequence."""
    num_sequences: int = 1
    group_of_sequence: Tensor | None = None
    """int64 [S]: equal numbers are one group; None stands for one group."""
    entropy: Tensor | None = None
    """Of the policy at the token's position, in nat; carries a gradient when the objective needs it."""
    values: Tensor | None = None
    """Of the critic when the samples were scored."""
    returns: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    """Of the sampled token."""
    teacher_topk_logprobs: Tensor | None = None
    """[N, k]: of the teacher's k likeliest tokens."""
    policy_topk_logprobs: Tensor | None = None
    """[N, k]: of the same tokens, under the policy; carries a gradient."""

    @property
    def mask(self) -> Tensor:
        """bool [N], True where the token counts."""
        return self.weights != 0

    @property
    def sequences(self) -> Tensor:
        """int64 [N]: `sequence_index`, written out."""
        if self.sequence_index is not None:
            return self.sequence_index
        return self.policy_logprobs.detach().new_zeros(len(self.weights)).long()

    @property
    def groups(self) -> Tensor:
        """int64 [S]: `group_of_sequence`, written out."""
        if self.group_of_sequence is not None:
            return self.group_of_sequence
        return self.policy_logprobs.detach().new_zeros(self.num_sequences).long()

    def sequence_sums(self, values: Tensor) -> Tensor:
        """Sum of `values` [N] over the unmasked tokens of each sequence: [S], with its gradient."""
        start = values.new_zeros(self.num_sequences)
        return start.index_add(0, self.sequences, unmasked(values, self.mask))

    def sequence_means(self, values: Tensor) -> Tensor:
        """Mean of `values` [N] over the unmasked tokens of each sequence: [S]; 0 where there is none."""
        return self.sequence_sums(values) / self.sequence_lengths().clamp(min=1)

    def sequence_lengths(self) -> Tensor:
        """Unmasked tokens of each sequence, as floats: [S]."""
        return self.sequence_sums(self.mask.to(self.weights.dtype))

    def spread(self, values: Tensor) -> Tensor:
        """`values` [S] of the sequences, given to each of their tokens: [N]."""
        return values.index_select(0, self.sequences)


def unmasked(values: Tensor, mask: Tensor) -> Tensor:
    """`values` with masked entries set to 0, so that nothing computed from them can poison a sum or a gradient."""
    return values.masked_fill(~mask, 0.0)
