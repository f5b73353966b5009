"""[trainer]: algorithm, optimizer, batching, precision and checkpoints."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from paceline.config.base import PluginTable, StrictModel

KlKind = Literal["k1", "k2", "k3", "low_variance", "unbiased"]
Direction = Literal["reverse", "forward"]
Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"]

_AGAINST_BEHAVIOUR = ("tis", "icepop", "mis", "rejection")
"""Corrections by the ratio of the behaviour to the sampler, which is 1 when they are the same."""


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


class CriticConfig(StrictModel):
    """The critic of estimators that need values (ppo), on the device of the policy; its table may be empty."""

    model_path: str = ""
    """Hugging Face model folder whose backbone it starts from; empty takes the policy's. Its vocabulary must be that of
    the policy."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Its own optimizer, learning rate and schedule."""
    lora: LoraConfig | None = None
    """Train an adapter and the value head only; without this table all parameters are trained."""
    value_clip: float = Field(default=0.2, ge=0)
    """How far a value may move from what it was before the step and still lower the loss; 0 is no bound."""
    epochs: int = Field(default=1, ge=1)
    """Passes over the groups of a step."""
    updates_per_epoch: int = Field(default=1, ge=1)
    """Optimizer updates of the critic that each pass is split into."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run that train the critic alone; the policy and its weights stay as they are."""
    offload: bool = False
    """Policy and critic take turns on the device: the one that does not work is in the host's memory."""


class DistillationConfig(StrictModel):
    """On-policy distillation from a teacher; without this table there is none."""

    mode: Literal["sampled", "topk"] = "sampled"
    """"sampled": coefficient times (policy - teacher log-probability) of the sampled token is taken off its advantage;
    "topk": coefficient times the KL over the teacher's k likeliest tokens is a term of the loss."""
    coefficient: float = Field(default=1.0, gt=0)
    k: int = Field(default=16, ge=1)
    """Tokens at each position in mode "topk"."""
    direction: Direction = "reverse"
    """KL(policy || teacher), or KL(teacher || policy), in mode "topk"."""
    tail: bool = True
    """All other tokens count as one more; false renormalizes both over the k tokens. Mode "topk"."""


class TeacherConfig(StrictModel):
    """A model to distil from; the key of its table is its name."""

    path: str = Field(min_length=1)
    """Hugging Face model folder with the policy's vocabulary."""


class ParallelConfig(StrictModel):
    """How the ranks of the trainer share model and data."""

    ranks: int = Field(default=1, ge=1)
    """Processes on this machine, one a GPU."""
    replicate: int = Field(default=1, ge=1)
    """fsdp: copies of the model; each is sharded over ranks / replicate ranks."""
    shard: int | None = Field(default=None, ge=1)
    """fsdp: ranks over which a copy is sharded; left out, ranks / replicate."""
    tensor: int = Field(default=1, ge=1)
    """megatron: ranks that share each matrix."""
    pipeline: int = Field(default=1, ge=1)
    """megatron: ranks that share the layers."""
    context: int = Field(default=1, ge=1)
    """megatron: ranks that share each sequence."""
    expert: int = Field(default=1, ge=1)
    """megatron: ranks that share the experts of a layer."""
    sequence_parallel: bool = False
    """megatron: tensor ranks also share the activations between matrices."""
    cpu_offload: bool = False
    """fsdp on GPUs: parameters, gradients and optimizer live in host memory."""
    activation_checkpointing: bool = False
    """Keep the inputs of layers only, and compute the rest again in the backward pass."""
    balance: Literal["tokens", "flops"] = "tokens"
    """What is made equal over data-parallel ranks."""


_PARALLEL_KEYS = {
    "torch": {"activation_checkpointing"},
    "fsdp": {"ranks", "replicate", "shard", "cpu_offload", "activation_checkpointing", "balance"},
    "megatron": {
        "ranks", "tensor", "pipeline", "context", "expert", "sequence_parallel", "activation_checkpointing", "balance",
    },
}  # fmt: skip


class TrainerConfig(StrictModel):
    """How the policy is trained."""

    loop: bool = True
    """false: no training loop. The trainer serves the primitives of TrainerService to clients until it is stopped, and
    publishes weights when it is asked to."""
    backend: Literal["torch", "fsdp", "megatron"] = "torch"
    """"torch": one process. "fsdp": ranks that shard a transformers model. "megatron": megatron-core."""
    parallel: ParallelConfig = ParallelConfig()
    estimator: PluginTable = PluginTable(name="grpo")
    """Advantage estimator with its options."""
    loss: PluginTable = PluginTable(name="ppo")
    """Policy loss with its options."""
    aggregation: Aggregation = "token_mean"
    """How token losses become one number."""
    aggregation_length: int | None = Field(default=None, ge=1)
    """Tokens that every sequence is divided by with aggregation "constant"."""
    corrections: list[PluginTable] = []
    """Token weights for the mismatch between sampler and policy, multiplied: "tis", "icepop", "mis", "rejection",
    "opsm", 'module:attribute'."""
    behaviour: Literal["sampler", "policy"] = "sampler"
    """Denominator of the ratio: the sampler's log-probabilities, or the policy's before the step's first update."""
    kl_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the KL to the reference in the loss; 0 loads no reference."""
    kl_kind: KlKind = "k3"
    entropy_coefficient: float = Field(default=0.0, ge=0)
    """Weight of the policy's entropy, which is taken off the loss."""
    distillation: DistillationConfig | None = None
    teachers: dict[str, TeacherConfig] = {}
    """Teachers by key. A record's metadata names its own under "teacher"; "default" is for the others."""
    updates_per_step: int = Field(default=1, ge=1)
    """Optimizer updates that a step's groups are split into; parts differ by at most one group."""
    epochs_per_step: int = Field(default=1, ge=1)
    """Passes over a step's groups, each of updates_per_step updates. What ratios are taken to is fixed before them."""
    routing_replay: bool = False
    """For models with experts: each token goes through the experts that the engine recorded, and only the router's
    weights over them are computed anew. Needs engine.record_routing, and backend "torch" or "fsdp"."""
    critic: CriticConfig | None = None
    lora: LoraConfig | None = None
    optimizer: OptimizerConfig = OptimizerConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type. Trained parameters and the optimizer are float32 in either case."""
    device: str = "cpu"
    threads: int = Field(default=1, ge=1)
    compile: bool = False
    """Fuse the small kernels of each layer with torch.compile; the first step takes a minute longer. GPUs only."""
    tokens_per_micro_batch: int = Field(default=4096, ge=1)
    """Most tokens of one forward pass; a single longer group goes alone. Rows lie one after another without padding,
    but in families with an attention of their own, whose padding counts."""
    checkpoint_every: int = Field(default=1, ge=1)
    """Steps between checkpoints. Groups are acknowledged by checkpoints, so a crash replays at most this many steps."""
    keep_checkpoints: int = Field(default=2, ge=2)
    save_optimizer: bool = True
    """False leaves the optimizer's moments out of checkpoints; progress and learning rate are always in them."""
    load_optimizer: bool = True
    """False starts from a checkpoint with new moments, but with its progress and learning rate."""
    async_checkpoints: bool = False
    """Write a checkpoint while the next step runs. Its groups are acknowledged only after that."""
    export: bool = True
    """Write a Hugging Face model folder at the end."""

    @property
    def needs_reference(self) -> bool:
        """Whether a frozen reference must be there: for the loss, its KL, or the estimator's KL in the reward."""
        reward_kl = self.estimator.options().get("kl_coefficient", 0.0)
        return self.kl_coefficient > 0 or self.loss.name == "dpo" or bool(reward_kl)

    @model_validator(mode="after")
    def _relations(self) -> TrainerConfig:
        gap = [table.name for table in self.corrections if table.name in _AGAINST_BEHAVIOUR]
        if self.behaviour == "sampler" and gap:
            raise ValueError(
                f"corrections = {gap[0]!r} contradicts behaviour = 'sampler': the sampler's log-probabilities are "
                "already the ratio's denominator; set behaviour = 'policy' or leave the correction out"
            )
        if self.estimator.name == "ppo" and self.critic is None:
            raise ValueError("estimator = 'ppo' needs values; add a table [trainer.critic], which may be empty")
        if self.critic is not None and self.backend != "torch":
            raise ValueError(f"critic: backend = {self.backend!r} has no critic; it needs backend = 'torch'")
        if self.lora is not None and self.backend != "torch":
            raise ValueError(
                f"lora: backend = {self.backend!r} trains all parameters; an adapter needs backend = 'torch'"
            )
        if (self.aggregation == "constant") != (self.aggregation_length is not None):
            raise ValueError(
                f'aggregation = {self.aggregation!r} with aggregation_length = {self.aggregation_length}: "constant" '
                "divides by that length, and no other aggregation does; set both or neither"
            )
        return self

    @model_validator(mode="after")
    def _replaying(self) -> TrainerConfig:
        if self.routing_replay and self.backend == "megatron":
            raise ValueError("routing_replay: backend = 'megatron' cannot replay routing; use 'torch' or 'fsdp'")
        if self.routing_replay and self.compile:
            raise ValueError("routing_replay: compiled layers cannot replay routing; leave compile out")
        return self

    @model_validator(mode="after")
    def _teaching(self) -> TrainerConfig:
        if self.distillation is not None and not self.teachers:
            raise ValueError("distillation needs a teacher; add a table [trainer.teachers.default] with its path")
        if self.teachers and self.distillation is None:
            raise ValueError(f"teachers.{next(iter(self.teachers))} is not used without a table [trainer.distillation]")
        if self.distillation is not None and self.backend != "torch":
            raise ValueError(f"distillation: backend = {self.backend!r} loads no teacher; it needs backend = 'torch'")
        return self

    @model_validator(mode="after")
    def _layout(self) -> TrainerConfig:
        parallel = self.parallel
        if self.compile and (self.backend == "megatron" or not self.device.startswith("cuda")):
            raise ValueError(
                f"compile = true with backend = {self.backend!r} and device = {self.device!r}: it is for the layers of "
                'backends "torch" and "fsdp" on device = "cuda"; leave it out'
            )
        for name in sorted(parallel.model_fields_set - _PARALLEL_KEYS[self.backend]):
            value = getattr(parallel, name)
            if value != ParallelConfig.model_fields[name].default:
                raise ValueError(f"parallel.{name} = {value} has no effect with backend = {self.backend!r}")
        ranks = parallel.ranks
        if self.backend == "fsdp":
            shard = parallel.shard or max(1, ranks // parallel.replicate)
            if parallel.replicate * shard != ranks:
                raise ValueError(f"parallel: replicate {parallel.replicate} x shard {shard} is not ranks {ranks}")
        if self.backend == "megatron":
            model = parallel.tensor * parallel.pipeline
            for name in ("context", "expert"):
                size = model * getattr(parallel, name)
                if ranks % size:
                    raise ValueError(
                        f"parallel: tensor {parallel.tensor} x pipeline {parallel.pipeline} x {name} "
                        f"{getattr(parallel, name)} = {size} does not divide ranks {ranks}"
                    )
        if parallel.cpu_offload and self.device == "cpu":
            raise ValueError("parallel.cpu_offload = true has no effect on device = 'cpu'")
        return self
