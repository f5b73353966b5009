"""What is minimized: the policy loss, weighted for mismatch, plus the KL to the reference. Sums, never means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from paceline.config import StrictModel, make_plugin
from paceline.config.base import PluginTable
from paceline.config.trainer import DistillationConfig, TrainerConfig
from services.trainer.corrections.base import Correction
from services.trainer.kl import KlKind, kl_estimate
from services.trainer.losses.base import Loss, LossSums, TokenBatch, unmasked

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
        """Sum of weighted token losses. Adds the metric sums policy_loss (weighted) and kl_reference (over tokens)."""
        mask = batch.mask
        corrected = batch
        for correction in self.corrections:
            corrected = replace(corrected, weights=corrected.weights * unmasked(correction(batch), mask))
        sums = self.loss(corrected)
        sums.metrics["policy_loss"] = sums.total.detach()
        if self.kl_coefficient > 0:
            kl = kl_estimate(
                unmasked(batch.policy_logprobs, mask), unmasked(_present(batch, "reference_logprobs"), mask),
                self.kl_kind,
            )  # fmt: skip
            sums.total = sums.total + self.kl_coefficient * (kl * batch.weights).sum()
            sums.metrics["kl_reference"] = kl.detach().sum()
        return sums


def _present(batch: TokenBatch, name: str) -> Tensor:
    values = getattr(batch, name)
    if values is None:
        raise ValueError(f"the objective needs {name}, which the batch has not")
    return values
