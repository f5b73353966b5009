"""Direct preference optimization on the pairs of each group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from paceline.config import StrictModel
from paceline.plugins import registry
from services.trainer.losses.base import LossSums, TokenBatch

if TYPE_CHECKING:
    from torch import Tensor


@registry("loss").register("dpo")
class Dpo:
    """L = -(1 - e) log sigmoid(m) - e log sigmoid(-m) on a pair, m = beta (h(chosen) - h(rejected)).

    h is the sum of policy - reference over the sequence's unmasked tokens. In each group the sequences with advantage
    > 0 are chosen, those with < 0 rejected, and each of the one is paired with each of the other. A sequence counts
    with the mean of its token weights times its mean loss over its pairs, so that under aggregation seq_mean_token_sum
    one pair a group gives the mean over pairs. Source: DPO, arXiv:2305.18290, eq. 7; e, the chance that a label is
    wrong: E. Mitchell, "A note on DPO with noisy preferences", 2023. Metric sums over pairs: preference_pairs,
    preference_correct (m > 0), preference_margin (m).
    """

    needs_reference = True
    needs_rewards = False

    class Options(StrictModel):
        """Options of the loss."""

        beta: float = Field(default=0.1, gt=0)
        label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
        """e: the share of labels that are taken to be wrong."""

    def __init__(self, options: Options) -> None:
        self._beta, self._smoothing = options.beta, options.label_smoothing

    def __call__(self, batch: TokenBatch) -> LossSums:
        """See Loss. ValueError without reference_logprobs."""
        if batch.reference_logprobs is None:
            raise ValueError("the loss 'dpo' needs reference_logprobs")
        chosen, rejected = _pairs(batch)
        score = batch.sequence_sums(batch.policy_logprobs - batch.reference_logprobs)
        margin = self._beta * (score[chosen] - score[rejected])
        right, wrong = _softplus(-margin), _softplus(margin)
        loss = (1 - self._smoothing) * right + self._smoothing * wrong
        share = batch.sequence_means(batch.weights)
        weight = share[chosen] / _opponents(chosen, share) + share[rejected] / _opponents(rejected, share)
        metrics = {
            "preference_pairs": share.new_tensor(float(len(chosen))),
            "preference_correct": (margin > 0).sum(), "preference_margin": margin.detach().sum(),
        }  # fmt: skip
        return LossSums((loss * weight).sum(), metrics)


def _pairs(batch: TokenBatch) -> tuple[Tensor, Tensor]:
    """Sequences of all pairs, chosen and rejected: two int64 [number of pairs]."""
    advantages = batch.sequence_means(batch.advantages)
    same = batch.groups[:, None] == batch.groups[None, :]
    pairs = same & (advantages > 0)[:, None] & (advantages < 0)[None, :]
    return pairs.nonzero(as_tuple=True)  # type: ignore[return-value]


def _opponents(side: Tensor, like: Tensor) -> Tensor:
    """How many pairs the sequence of each pair is in."""
    counts = like.new_zeros(len(like)).index_add(0, side, like.new_ones(len(side)))
    return counts[side]


def _softplus(values: Tensor) -> Tensor:
    """log(1 + exp(x)), without overflow."""
    return values.clamp(min=0) + values.abs().neg().exp().log1p()
