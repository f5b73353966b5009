"""What decoders of the Llama kind have in common: grouped-query attention, RMS norms, a gated MLP, rotary positions."""

from __future__ import annotations

from typing import Any

from paceline.config import ConfigError
from services.trainer.megatron.mapping import Grouped, Rule, Stacked

TINY: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.3, "tie_word_embeddings": False,
    "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
"""Keys of a tiny model of any of these families."""


def common_fields(config: Any) -> dict[str, Any]:
    """Fields of TransformerConfig from a transformers configuration."""
    return {
        "num_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
        "ffn_hidden_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads, "kv_channels": head_size(config),
        "layernorm_epsilon": config.rms_norm_eps,
    }  # fmt: skip


def head_size(config: Any) -> int:
    """Numbers of one attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def refuse(config: Any, wanted: dict[str, Any]) -> None:
    """ConfigError for the first key whose value is not the wanted one; a key that is not there has it."""
    for key, value in wanted.items():
        found = getattr(config, key, value)
        if found != value and not (value is False and not found):
            raise ConfigError(
                f'backend = "megatron" cannot train this {config.model_type}: its {key} is {found!r}, and only '
                f'{value!r} is known here; use backend = "torch" or "fsdp"'
            )


def layer_name(number: int, name: str) -> str:
    """Hugging Face's name of a tensor in a layer."""
    return f"model.layers.{number}.{name}"


def attention(config: Any, number: int, bias: bool = False, norms: bool = False) -> list[Rule]:
    """Norm before attention, query-key-value, output; with biases of the first, and norms of heads, where they are."""
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, head_size(config)
    join = Grouped(groups, (heads // groups * size, size, size))
    rules = [_one("input_layernorm.weight", number), _qkv("weight", number, join)]
    if bias:
        rules.append(_qkv("bias", number, join))
    if norms:
        for letter in "qk":
            name = layer_name(number, f"self_attn.{letter}_norm.weight")
            rules.append(Rule(f"self_attention.{letter}_layernorm.weight", (name,)))
    output = layer_name(number, "self_attn.o_proj.weight")
    return [*rules, Rule("self_attention.linear_proj.weight", (output,), cut=1)]


def mlp(number: int) -> list[Rule]:
    """Norm before the MLP, gate and up, down."""
    gate_up = tuple(layer_name(number, f"mlp.{name}_proj.weight") for name in ("gate", "up"))
    return [
        after_attention(number),
        Rule("mlp.linear_fc1.weight", gate_up, Stacked(2), cut=1),
        Rule("mlp.linear_fc2.weight", (layer_name(number, "mlp.down_proj.weight"),), cut=1),
    ]


def after_attention(number: int) -> Rule:
    """The norm before the MLP."""
    return Rule("pre_mlp_layernorm.weight", (layer_name(number, "post_attention_layernorm.weight"),))


def no_sliding_window(config: Any) -> None:
    """ConfigError where some layers see a window only."""
    refuse(config, {"use_sliding_window": False, "layer_types": ["full_attention"] * config.num_hidden_layers})


def _one(name: str, number: int) -> Rule:
    return Rule(name, (layer_name(number, name),))


def _qkv(kind: str, number: int, join: Grouped) -> Rule:
    names = tuple(layer_name(number, f"self_attn.{letter}_proj.{kind}") for letter in "qkv")
    return Rule(f"self_attention.linear_qkv.{kind}", names, join, cut=0)
