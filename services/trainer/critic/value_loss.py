"""The loss of a critic."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.trainer.losses.base import LossSums
from services.trainer.token_batch import unmasked

if TYPE_CHECKING:
    from torch import Tensor


def clipped_value_loss(
    predicted: Tensor, values: Tensor, returns: Tensor, weights: Tensor, clip: float | None = 0.2
) -> LossSums:
    """Sum of weight times max((V - G)^2, (v + clip(V - v, -clip, clip) - G)^2) / 2; all tensors are [num_tokens].

    V is `predicted`, which carries the gradient, v what the critic said when the samples were scored (`values`), G the
    return. `clip` None leaves (V - G)^2 / 2. Source: the value function clipping of OpenAI's PPO (baselines, 2017) on
    the squared error of PPO, arXiv:1707.06347, eq. 9. Tokens of weight 0 get neither value nor gradient. Metric sums:
    value_clip_fraction, the tokens whose clipped branch is the active one.
    """
    mask = weights != 0
    target = unmasked(returns, mask)
    value, before = unmasked(predicted, mask), unmasked(values, mask)
    loss = (value - target).square()
    active = mask & ~mask
    if clip is not None:
        clipped = (before + (value - before).clamp(-clip, clip) - target).square()
        active = (clipped > loss) & mask
        loss = loss.maximum(clipped)
    return LossSums((loss / 2 * weights).sum(), {"value_clip_fraction": active.sum()})
