"""[trainer]: algorithm, optimizer, batching, precision and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import PluginTable, StrictModel


class OptimizerConfig(StrictModel):
    """AdamW and its schedule."""

    learning_rate: float = Field(default=1e-5, gt=0)
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(default=1e-8, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    warmup_steps: int = Field(default=0, ge=0)
    """The rate goes up linearly from learning_rate / warmup_steps."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """What follows the warm-up, down to min_learning_rate at the last step of the run."""
    min_learning_rate: float = Field(default=0.0, ge=0)
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this global L2 norm."""


class LoraConfig(StrictModel):
    """A low-rank adapter; without this table all parameters are trained."""

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    target_modules: list[str] | Literal["all-linear"] = "all-linear"


class CorrectionConfig(StrictModel):
    """Weights for the mismatch between sampler and policy log-probabilities."""

    kind: Literal["none", "tis"] = "none"
    """"tis": truncated importance sampling, w = min(exp(policy - sampler), clip) on each token."""
    clip: float = Field(default=2.0, gt=0)


class TrainerConfig(StrictModel):
    """How the policy is trained."""

    backend: Literal["torch"] = "torch"
    estimator: PluginTable = PluginTable(name="grpo")
    """Advantage estimator with its options."""
    loss: PluginTable = PluginTable(name="ppo")
    """Policy loss with its options."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """How token losses become one number."""
    correction: CorrectionConfig = CorrectionConfig()
    behaviour: Literal["sampler", "policy"] = "sampler"
    """Denominator of the ratio: the sampler's log-probabilities, or the policy's before the step's first update."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; 0 loads no reference."""
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates that a step's groups are split into."""
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type. Trained parameters and the optimizer are float32 in either case."""
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Most tokens, padding included, of one forward pass; a single longer group goes alone."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps between checkpoints. Groups are acknowledged by checkpoints, so a crash replays at most this many steps."""
    keep_checkpoints: int = Field(default=2, ge=2)
    export: bool = True
    """Write a Hugging Face model folder at the end."""

    @model_validator(mode="after")
    def _relations(self) -> TrainerConfig:
        if self.behaviour == "sampler" and self.correction.kind == "tis":
            raise ValueError(
                "correction.kind = 'tis' contradicts behaviour = 'sampler': the sampler's log-probabilities are "
                "already the ratio's denominator; set behaviour = 'policy' or correction.kind = 'none'"
            )
        return self
