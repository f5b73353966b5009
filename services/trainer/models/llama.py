"""Llama 2 and 3, and what has their shape: SmolLM2, TinyLlama, Yi."""

from __future__ import annotations

from typing import Any

from paceline.plugins import registry
from services.trainer.megatron.mapping import Rule
from services.trainer.models import _decoder as decoder


@registry("model_family").register("llama")
class Llama:
    """See ModelFamily."""

    def __init__(self, config: Any) -> None:
        decoder.refuse(config, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"})
        self._config = config

    def fields(self) -> dict[str, Any]:
        """See ModelFamily."""
        return decoder.common_fields(self._config)

    def layer(self, number: int) -> list[Rule]:
        """See ModelFamily."""
        return [*decoder.attention(self._config, number), *decoder.mlp(number)]

    def stored(self, tensor: str, row: int) -> list[str]:
        """See ModelFamily."""
        return []

    @staticmethod
    def tiny() -> Any:
        """See ModelFamily."""
        from transformers import LlamaConfig

        return LlamaConfig(**decoder.TINY)
