"""The value model: the policy's kind of backbone with one number a position in place of a vocabulary."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from paceline.config.trainer import LoraConfig
from services.trainer.model.policy import Policy
from services.trainer.packing import PackedBatch

HEAD = "value_head"


class ValueModel:
    """Values of packed rows. The head starts at zero, so that the first values are 0 whatever the backbone says.

    `trainable` maps Hugging Face (or PEFT) names, and value_head.weight and value_head.bias, to parameters.
    """

    def __init__(self, path: Path, dtype: torch.dtype, lora: LoraConfig | None, seed: int, device: str) -> None:
        self._policy = Policy(path, dtype, lora, seed, device)
        self.device = self._policy.device
        self.hidden_size = self._policy.hidden_size
        self.vocabulary = self._policy.vocabulary
        self.shares_prefixes = self._policy.shares_prefixes
        head_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        self.head = nn.Linear(self.hidden_size, 1, device=self.device, dtype=head_dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)
        # Values do not need the vocabulary's head; one that is tied to the embedding stays as the embedding.
        self._policy.model.set_output_embeddings(nn.Identity())
        backbone = self._policy.trainable if lora is not None else dict(self._policy.model.named_parameters())
        self.trainable = {**backbone, **{f"{HEAD}.{name}": item for name, item in self.head.named_parameters()}}

    def score(self, batch: PackedBatch) -> Tensor:
        """[N]: for each predicted token the value of the state before it, float32 (float64 for float64 models)."""
        states = self._policy.states(batch)
        kind = torch.float64 if states.dtype == torch.float64 else torch.float32
        return nn.functional.linear(states.to(kind), self.head.weight.to(kind), self.head.bias.to(kind)).squeeze(1)

    def tensors(self) -> list[Tensor]:
        """All tensors that are on the device."""
        return [*self._policy.model.parameters(), *self._policy.model.buffers(), *self.head.parameters()]
