"""Builds a stage of a policy in megatron-core from its Hugging Face configuration, and runs it on streams of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
import transformers
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.functional import silu

from paceline.config import ConfigError
from paceline.config.trainer import ParallelConfig
from paceline.plugins import UnknownPlugin, registry
from services.trainer.megatron.attention import CoreAttention, PackedTokens
from services.trainer.megatron.compat import Norm
from services.trainer.megatron.layout import Layout, check_layout
from services.trainer.megatron.scores import over_context, vocabulary_scores
from services.trainer.megatron.stream import Stream, places_of, segments_of
from services.trainer.model.layers import recomputed
from services.trainer.models.base import ModelFamily


class PolicyModel(GPTModel):
    """One pipeline stage. The last one returns hidden states, not logits, which are only made in chunks."""

    def _preprocess(self, *arguments: Any, packed_seq_params: Any = None, **named: Any) -> Any:
        found: Any = super()._preprocess(*arguments, packed_seq_params=packed_seq_params, **named)
        # Rotary positions of each token of the stream, in place of a loop over sequences in every layer.
        return found[0], found[1].index_select(0, packed_seq_params.positions), *found[2:]

    def _postprocess(self, hidden_states: Tensor, *arguments: Any, **named: Any) -> Tensor:
        return hidden_states

    @property
    def head(self) -> Tensor:
        """[padded vocabulary / tensor ranks, hidden size]"""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return cast(Tensor, self.output_layer.weight)


class Stage:
    """This rank's part of one policy: model, family and sizes."""

    def __init__(
        self, path: Path, config: ParallelConfig, layout: Layout, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.layout, self.device = layout, device
        self.source = load_config(path)
        self.family = family_of(self.source)
        fields = self.family.fields()
        check_layout(config, self.source, fields)
        self.vocabulary = int(self.source.vocab_size)
        self.rows = -(-self.vocabulary // layout.tensor.size)
        self.tied = bool(self.source.tie_word_embeddings)
        self.config = _transformer_config(fields, config, dtype, device)
        self.model = self._build(dtype)
        self.multiple = 2 * layout.context.size * layout.tensor.size if layout.context.size > 1 else layout.tensor.size
        if config.activation_checkpointing:
            for layer in self.model.decoder.layers:
                layer.forward = recomputed(layer.forward)

    @property
    def layers(self) -> range:
        """Numbers of the layers of this stage."""
        count = self.config.num_layers // self.layout.pipeline.size
        return range(self.layout.pipeline.rank * count, (self.layout.pipeline.rank + 1) * count)

    def _build(self, dtype: torch.dtype) -> PolicyModel:
        spec = get_gpt_layer_local_spec(
            num_experts=self.config.num_moe_experts, normalization="RMSNorm", qk_layernorm=self.config.qk_layernorm
        )
        parts: Any = spec.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        attention = parts.self_attention.submodules
        attention.core_attention = CoreAttention
        if self.config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = Norm
        block = TransformerBlockSubmodules(layer_specs=[spec] * len(self.layers), layer_norm=cast(Any, Norm))
        model = PolicyModel(
            self.config, cast(Any, block), vocab_size=self.rows * self.layout.tensor.size,
            max_sequence_length=self.source.max_position_embeddings, pre_process=self.layout.first_stage,
            post_process=self.layout.last_stage, parallel_output=True, share_embeddings_and_output_weights=self.tied,
            position_embedding_type="rope", rotary_base=cast(int, _rotary_base(self.source)),
        )  # fmt: skip
        frequencies = _rotary_frequencies(self.source, self.device)
        if frequencies is not None:
            model.rotary_pos_emb.inv_freq = frequencies
        return model.to(dtype)

    def run(self, model: Any, stream: Stream) -> Tensor:
        """Hidden states of this rank's tokens, after this stage. `model` is the stage's, or what wraps it."""
        context = self.layout.context
        total = len(stream.token_ids)
        places = places_of(total, context.rank, context.size)
        longest = int((stream.bounds[1:] - stream.bounds[:-1]).max())
        ends = torch.tensor([0, total], dtype=torch.int32)
        packed = PackedTokens(
            qkv_format="thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=longest, max_seqlen_kv=longest,
            segments=segments_of(stream.bounds, context.rank, context.size),
            positions=torch.from_numpy(stream.positions).to(self.device),
        )  # fmt: skip
        tokens = torch.from_numpy(stream.token_ids[places]).to(self.device).unsqueeze(0)
        return model(input_ids=tokens, position_ids=None, attention_mask=None, packed_seq_params=packed)

    def scores(self, hidden: Tensor, stream: Stream, entropy_gradient: bool = False) -> tuple[Tensor, Tensor]:
        """On the last stage: log-probability and entropy of the stream's predicted tokens, two float32 [N].

        Every tensor and context rank gets those of all tokens.
        """
        tensor, context = self.layout.tensor, self.layout.context
        if self.config.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(hidden, group=tensor.group)
        elif tensor.size > 1:
            hidden = copy_to_tensor_model_parallel_region(hidden, group=tensor.group)
        total = len(stream.token_ids)
        order = torch.full((total,), -1)
        places = torch.from_numpy(places_of(total, context.rank, context.size))
        order[places] = torch.arange(len(places))
        local = order[torch.from_numpy(stream.source)]
        index = (local >= 0).nonzero().squeeze(1).to(self.device)
        chosen = hidden.flatten(0, 1).index_select(0, local.to(self.device)[index])
        factor = 1.0 / torch.from_numpy(stream.temperature).to(self.device)[index]
        targets = torch.from_numpy(stream.targets).to(self.device)[index]
        head = self.model.head[: self.vocabulary - self.rows * tensor.rank]
        logprobs, entropy = vocabulary_scores(chosen, head, targets, factor, self.rows, tensor.group, entropy_gradient)
        count = len(stream.source)
        return (
            over_context(logprobs, index, count, context.group), over_context(entropy, index, count, context.group)
        )  # fmt: skip


def load_config(path: Path) -> Any:
    """The transformers configuration of a local folder. ConfigError when the folder is not one."""
    if not (path / "config.json").is_file():
        raise ConfigError(f"model.path = {str(path)!r} is not a Hugging Face model folder: it has no config.json")
    return transformers.AutoConfig.from_pretrained(path, local_files_only=True)


def family_of(config: Any) -> ModelFamily:
    """The family that knows the model. ConfigError when none does."""
    try:
        return registry("model_family").load(config.model_type)(config)
    except UnknownPlugin as error:
        raise ConfigError(f'backend = "megatron": {error}; or use backend = "torch" or "fsdp"') from error


def _transformer_config(
    fields: dict[str, Any], parallel: ParallelConfig, dtype: torch.dtype, device: torch.device
) -> TransformerConfig:
    host = device.type == "cpu"
    experts: dict[str, Any] = {}
    if "num_moe_experts" in fields:
        experts = {
            "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0, "moe_router_dtype": "fp32",
        }  # fmt: skip
    return TransformerConfig(
        normalization="RMSNorm", add_bias_linear=False, gated_linear_unit=True, activation_func=silu,
        hidden_dropout=0.0, attention_dropout=0.0, params_dtype=dtype, bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype, tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline, context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert, expert_tensor_parallel_size=parallel.tensor,
        sequence_parallel=parallel.sequence_parallel, variable_seq_lengths=True, batch_p2p_comm=not host,
        moe_token_dispatcher_type="alltoall", cuda_graph_scope=[],
        # Loss functions return sums; nothing is divided before the whole update is known.
        calculate_per_token_loss=True, use_cpu_initialization=host, perform_initialization=False,
        gradient_accumulation_fusion=False, bias_activation_fusion=not host, bias_dropout_fusion=False,
        masked_softmax_fusion=False, apply_rope_fusion=False, persist_layer_norm=False, **experts, **fields,
    )  # type: ignore[call-arg]  # fmt: skip


def _rotary_base(config: Any) -> float:
    return float(config.rope_parameters["rope_theta"])


def _rotary_frequencies(config: Any, device: torch.device) -> Tensor | None:
    """Frequencies of scaled rotary positions, by transformers' own rule; None where they are not scaled."""
    kind = config.rope_parameters["rope_type"]
    if kind == "default":
        return None
    rules = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS
    scale = 1.0
    if kind in ("linear", "llama3"):
        frequencies, scale = rules[kind](config, device)
        if scale == 1.0:
            return frequencies.float()
    raise ConfigError(
        f'backend = "megatron" cannot train this {config.model_type}: its rope_type is {kind!r}, and only "default", '
        '"linear" and "llama3" are known here; use backend = "torch" or "fsdp"'
    )
