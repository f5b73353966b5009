"""What is minimized: the policy loss, weighted for mismatch, plus the KL to the reference. Sums, never means."""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.trainer.corrections import truncated_importance_weights
from services.trainer.kl import KlKind, kl_estimate
from services.trainer.losses.base import Loss, LossSums, TokenBatch, unmasked


@dataclass(frozen=True)
class Objective:
    """A loss plug-in with what every loss can be given."""

    loss: Loss
    kl_coefficient: float = 0.0
    kl_kind: KlKind = "k3"
    tis_clip: float | None = None
    """Upper bound of truncated importance sampling; None is off."""

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are needed."""
        return self.kl_coefficient > 0

    def __call__(self, batch: TokenBatch) -> LossSums:
        """Sum of weighted token losses. Adds the metric sums policy_loss (weighted) and kl_reference (over tokens)."""
        mask = batch.mask
        corrected = batch
        if self.tis_clip is not None:
            tis = truncated_importance_weights(
                unmasked(batch.behaviour_logprobs, mask), unmasked(batch.sampler_logprobs, mask), self.tis_clip
            )
            corrected = replace(batch, weights=batch.weights * tis)
        sums = self.loss(corrected)
        sums.metrics["policy_loss"] = sums.total.detach()
        if self.needs_reference:
            if batch.reference_logprobs is None:
                raise ValueError("kl_coefficient > 0, but the batch has no reference_logprobs")
            policy = unmasked(batch.policy_logprobs, mask)
            kl = kl_estimate(policy, unmasked(batch.reference_logprobs, mask), self.kl_kind)
            sums.total = sums.total + self.kl_coefficient * (kl * batch.weights).sum()
            sums.metrics["kl_reference"] = kl.detach().sum()
        return sums
