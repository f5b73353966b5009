"""What is minimized: the policy loss, weighted for mismatch, plus KL, entropy and teacher. Sums, never means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.config import StrictModel, make_plugin
from paceline.config.base import PluginTable
from paceline.config.trainer import DistillationConfig, KlKind, TrainerConfig
from services.trainer.corrections.base import Correction
from services.trainer.losses.base import Loss, LossSums, TokenBatch, unmasked
from services.trainer.penalties.distillation import distilled_advantages, topk_divergence
from services.trainer.penalties.kl import kl_estimate

if TYPE_CHECKING:
    from torch import Tensor


class ObjectiveSpec(StrictModel):
    """An objective as JSON, from which every rank builds the same one."""

    loss: PluginTable
    corrections: tuple[PluginTable, ...] = ()
    kl_coefficient: float = 0.0
    kl_kind: KlKind = "k3"
    entropy_coefficient: float = 0.0
    distillation: DistillationConfig | None = None


@dataclass(frozen=True)
class Objective:
    """A loss plug-in with what every loss can be given."""

    loss: Loss
    kl_coefficient: float = 0.0
    kl_kind: KlKind = "k3"
    corrections: Sequence[Correction] = ()
    entropy_coefficient: float = 0.0
    distillation: DistillationConfig | None = None
    source: ObjectiveSpec | None = None
    """What it was built from; None when it was put together from objects, and so cannot be sent."""

    @classmethod
    def from_config(cls, config: TrainerConfig) -> Objective:
        """The objective of a run. ConfigError names the key of a plug-in that does not exist or has wrong options."""
        return cls._build(
            ObjectiveSpec(
                loss=config.loss, corrections=tuple(config.corrections), kl_coefficient=config.kl_coefficient,
                kl_kind=config.kl_kind, entropy_coefficient=config.entropy_coefficient,
                distillation=config.distillation,
            )
        )  # fmt: skip

    @classmethod
    def from_spec(cls, spec: dict[str, Any]) -> Objective:
        """The objective that `spec` described; keys left out have their defaults: {"loss": {"name": "ppo"}}."""
        return cls._build(ObjectiveSpec.model_validate(spec))

    def spec(self) -> dict[str, Any]:
        """JSON that `from_spec` takes. ValueError when the objective was put together from objects."""
        if self.source is None:
            raise ValueError("this objective was made of objects; use Objective.from_spec to get one that can be sent")
        return self.source.model_dump(mode="json")

    @classmethod
    def _build(cls, spec: ObjectiveSpec) -> Objective:
        loss = make_plugin("loss", spec.loss, "trainer.loss")
        corrections = tuple(
            make_plugin("correction", table, f"trainer.corrections.{index}")
            for index, table in enumerate(spec.corrections)
        )
        return cls(
            loss, spec.kl_coefficient, spec.kl_kind, corrections, spec.entropy_coefficient, spec.distillation, spec
        )

    @property
    def needs_reference(self) -> bool:
        """Whether reference log-probabilities are needed."""
        return self.kl_coefficient > 0 or bool(getattr(self.loss, "needs_reference", False))

    @property
    def needs_entropy(self) -> bool:
        """Whether the batch must carry the entropy with its gradient."""
        return self.entropy_coefficient > 0

    @property
    def needs_teacher(self) -> bool:
        """Whether the teacher's log-probabilities of the sampled tokens are needed."""
        return self.distillation is not None and self.distillation.mode == "sampled"

    @property
    def needs_topk(self) -> int:
        """How many likeliest tokens of the teacher are needed at each position; 0 means none."""
        return self.distillation.k if self.distillation is not None and self.distillation.mode == "topk" else 0

    @property
    def needs_advantages(self) -> bool:
        """Whether a group whose advantages are all 0 has no gradient, so that leaving it out changes no sum."""
        other = self.kl_coefficient > 0 or self.entropy_coefficient > 0 or self.distillation is not None
        return not other and bool(getattr(self.loss, "needs_advantages", True))

    def __call__(self, batch: TokenBatch) -> LossSums:
        """Sum of weighted token losses, and metric sums: policy_loss is weighted, the others are over tokens.

        kl_reference, distillation_kl where they are in the loss; correction_* of the product of all corrections.
        """
        metrics: dict[str, Tensor] = {}
        batch = self._towards_teacher(batch, metrics)
        sums = self.loss(self._corrected(batch, metrics))
        sums.metrics.update(metrics, policy_loss=sums.total.detach())
        mask = batch.mask
        if self.kl_coefficient > 0:
            reference = unmasked(_present(batch, "reference_logprobs"), mask)
            behaviour = unmasked(batch.behaviour_logprobs, mask)
            kl = kl_estimate(unmasked(batch.policy_logprobs, mask), reference, self.kl_kind, behaviour)
            self._add(sums, "kl_reference", self.kl_coefficient, kl, batch)
        if self.entropy_coefficient > 0:
            entropy = unmasked(_present(batch, "entropy", gradient=True), mask)
            sums.total = sums.total - self.entropy_coefficient * (entropy * batch.weights).sum()
        if self.distillation is not None and self.needs_topk:
            policy, teacher = _present(batch, "policy_topk_logprobs", True), _present(batch, "teacher_topk_logprobs")
            rows = ~mask.unsqueeze(1)
            divergence = topk_divergence(
                policy.masked_fill(rows, 0.0), teacher.masked_fill(rows, 0.0), self.distillation.direction,
                self.distillation.tail,
            )  # fmt: skip
            self._add(sums, "distillation_kl", self.distillation.coefficient, unmasked(divergence, mask), batch)
        return sums

    def _towards_teacher(self, batch: TokenBatch, metrics: dict[str, Tensor]) -> TokenBatch:
        if self.distillation is None or not self.needs_teacher:
            return batch
        policy = unmasked(batch.policy_logprobs, batch.mask).detach()
        teacher = unmasked(_present(batch, "teacher_logprobs"), batch.mask)
        metrics["distillation_kl"] = (policy - teacher).sum()
        advantages = unmasked(batch.advantages, batch.mask)
        return replace(
            batch, advantages=distilled_advantages(advantages, policy, teacher, self.distillation.coefficient)
        )

    def _corrected(self, batch: TokenBatch, metrics: dict[str, Tensor]) -> TokenBatch:
        if not self.corrections:
            return batch
        mask = batch.mask
        factor = mask.to(batch.weights.dtype)
        for correction in self.corrections:
            factor = factor * unmasked(correction(batch).detach(), mask)
        metrics.update(
            correction_rejected_fraction=(mask & (factor == 0)).sum(), correction_weight_mean=factor.sum(),
            correction_weight_square=factor.square().sum(),
            correction_weight_max=factor.amax() if len(factor) else factor.sum(),
        )  # fmt: skip
        return replace(batch, weights=batch.weights * factor)

    @staticmethod
    def _add(sums: LossSums, name: str, coefficient: float, values: Tensor, batch: TokenBatch) -> None:
        sums.total = sums.total + coefficient * (values * batch.weights).sum()
        sums.metrics[name] = values.detach().sum()


def _present(batch: TokenBatch, name: str, gradient: bool = False) -> Tensor:
    """A field of the batch. ValueError when it is missing, or has no gradient though the policy has one."""
    values = getattr(batch, name)
    if values is None:
        raise ValueError(f"the objective needs {name}, which the batch has not")
    if gradient and batch.policy_logprobs.requires_grad and not values.requires_grad:
        raise ValueError(f"the objective needs the gradient of {name}, which the batch does not carry")
    return values
