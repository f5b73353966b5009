"""Qwen3-MoE: Qwen3 whose MLPs are experts behind a router. transformers has all experts of a layer in one tensor."""

from __future__ import annotations

from typing import Any

from paceline.plugins import registry
from services.trainer.megatron.mapping import Rule, Stacked
from services.trainer.models import _decoder as decoder

_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


@registry("model_family").register("qwen3_moe")
class Qwen3Moe:
    """See ModelFamily."""

    def __init__(self, config: Any) -> None:
        decoder.refuse(config, {"attention_bias": False, "hidden_act": "silu", "decoder_sparse_step": 1})
        decoder.refuse(config, {"mlp_only_layers": [], "output_router_logits": False})
        decoder.no_sliding_window(config)
        self._config = config

    def fields(self) -> dict[str, Any]:
        """See ModelFamily. Logits of the router are taken as transformers takes them, in float32 after the product."""
        config = self._config
        return {
            **decoder.common_fields(config), "qk_layernorm": True, "num_moe_experts": config.num_experts,
            "moe_ffn_hidden_size": config.moe_intermediate_size, "moe_router_topk": config.num_experts_per_tok,
            # A softmax over the chosen logits is one over all, normalized over the chosen.
            "moe_router_pre_softmax": not config.norm_topk_prob,
        }  # fmt: skip

    def layer(self, number: int) -> list[Rule]:
        """See ModelFamily."""
        rules = [*decoder.attention(self._config, number, norms=True), decoder.after_attention(number)]
        rules.append(Rule("mlp.router.weight", (decoder.layer_name(number, "mlp.gate.weight"),)))
        gate_up, down = (decoder.layer_name(number, f"mlp.experts.{name}") for name in _PARTS)
        for expert in range(self._config.num_experts):
            own = f"mlp.experts.local_experts.{expert}"
            rules.append(Rule(f"{own}.linear_fc1.weight", (gate_up,), Stacked(2, fused=True), cut=1, expert=expert))
            rules.append(Rule(f"{own}.linear_fc2.weight", (down,), cut=1, expert=expert))
        return rules

    def stored(self, tensor: str, row: int) -> list[str]:
        """See ModelFamily: folders have gate, up and down projection of each expert."""
        folder, _, name = tensor.rpartition(".")
        return [f"{folder}.{row}.{part}.weight" for part in _PARTS.get(name, ())]

    @staticmethod
    def tiny() -> Any:
        """See ModelFamily."""
        from transformers import Qwen3MoeConfig

        sizes = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
        kinds: dict[str, Any] = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
        return Qwen3MoeConfig(**{**decoder.TINY, **sizes, **kinds})
