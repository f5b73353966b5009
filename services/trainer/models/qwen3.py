"""Qwen3: Llama with norms of each query and key head, whose size is free."""

from __future__ import annotations

from typing import Any

from paceline.plugins import registry
from services.trainer.megatron.mapping import Rule
from services.trainer.models import _decoder as decoder


@registry("model_family").register("qwen3")
class Qwen3:
    """See ModelFamily."""

    def __init__(self, config: Any) -> None:
        decoder.refuse(config, {"attention_bias": False, "hidden_act": "silu"})
        decoder.no_sliding_window(config)
        self._config = config

    def fields(self) -> dict[str, Any]:
        """See ModelFamily."""
        return {**decoder.common_fields(self._config), "qk_layernorm": True}

    def layer(self, number: int) -> list[Rule]:
        """See ModelFamily."""
        return [*decoder.attention(self._config, number, norms=True), *decoder.mlp(number)]

    def stored(self, tensor: str, row: int) -> list[str]:
        """See ModelFamily."""
        return []

    @staticmethod
    def tiny() -> Any:
        """See ModelFamily."""
        from transformers import Qwen3Config

        return Qwen3Config(**decoder.TINY, head_dim=16)
