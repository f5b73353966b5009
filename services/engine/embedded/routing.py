"""Records which experts each token goes through, as paceline.routing says, while the model computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from paceline import routing
from paceline.config import ConfigError

_ROUTERS = "TopKRouter"
"""How transformers' routers are called; they return (logits, scores [tokens, top_k], experts [tokens, top_k])."""


class RoutingRecorder:
    """Listens to the routers of a model. One pass at a time."""

    def __init__(self, model: torch.nn.Module, path: str) -> None:
        routers: list[Any] = [item for item in model.modules() if type(item).__name__.endswith(_ROUTERS)]
        if not routers:
            raise ConfigError(
                f"engine.record_routing = true: {type(model).__name__} of model.path = {path!r} has no experts whose "
                "router is known; leave it out"
            )
        self._dtype = routing.dtype_for(max(int(item.num_experts) for item in routers))
        self._seen: list[torch.Tensor] = []
        for router in routers:
            router.register_forward_hook(self._listen)

    def begin(self) -> None:
        """A pass begins."""
        self._seen.clear()

    def take(self, rows: int) -> np.ndarray:
        """[rows, length, num_moe_layers, top_k] of the pass that has ended."""
        found = torch.stack(self._seen, 1)
        self._seen.clear()
        return found.view(rows, -1, *found.shape[1:]).cpu().numpy().astype(self._dtype)

    def _listen(self, module: torch.nn.Module, arguments: Any, output: Any) -> None:
        self._seen.append(output[2])
