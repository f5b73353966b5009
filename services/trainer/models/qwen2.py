"""Qwen2 and Qwen2.5: Llama with biases of query, key and value."""

from __future__ import annotations

from typing import Any

from paceline.plugins import registry
from services.trainer.megatron.mapping import Rule
from services.trainer.models import _decoder as decoder


@registry("model_family").register("qwen2")
class Qwen2:
    """See ModelFamily."""

    def __init__(self, config: Any) -> None:
        decoder.refuse(config, {"hidden_act": "silu"})
        decoder.no_sliding_window(config)
        self._config = config

    def fields(self) -> dict[str, Any]:
        """See ModelFamily."""
        return {**decoder.common_fields(self._config), "add_qkv_bias": True}

    def layer(self, number: int) -> list[Rule]:
        """See ModelFamily."""
        return [*decoder.attention(self._config, number, bias=True), *decoder.mlp(number)]

    def stored(self, tensor: str, row: int) -> list[str]:
        """See ModelFamily."""
        return []

    @staticmethod
    def tiny() -> Any:
        """See ModelFamily."""
        from transformers import Qwen2Config

        return Qwen2Config(**{**decoder.TINY, "tie_word_embeddings": True})
