"""The repeated blocks of a transformers model: what is sharded one by one, and computed again in the backward pass."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline.config import ConfigError


def decoder_layers(model: Any) -> list[nn.Module]:
    """The blocks in order. ConfigError for a family that does not say which they are."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ConfigError(
            f"the blocks of {type(model).__name__} are not known: transformers lists none in _no_split_modules"
        )
    return found


def checkpoint_activations(model: Any) -> None:
    """Keep only the inputs of blocks for the backward pass. Results are the same bits; a third more is computed."""
    for layer in decoder_layers(model):
        layer.forward = recomputed(layer.forward)  # type: ignore[method-assign]


def compile_layers(model: Any) -> None:
    """Fuse each block's small kernels with torch.compile, once for all lengths. Results differ by rounding."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def recomputed(forward: Any) -> Any:
    """`forward` with only its inputs kept for the backward pass."""

    def run(*arguments: Any, **named: Any) -> Any:
        return checkpoint(forward, *arguments, use_reentrant=False, **named)

    return run
