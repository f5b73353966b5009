"""Routing of mixture-of-experts models as it travels: which experts each token went through, recorded by an engine.

The array is [num_tokens - 1, num_moe_layers, top_k]: row t is of the pass that read token t. The last token of a
sequence has no row, because nothing was predicted from it and so no pass read it. Layers without experts have no place.
"""

from __future__ import annotations

from typing import Any

import numpy as np

NAME = "routing"
"""Name under which a sample has it."""
DTYPES: tuple[np.dtype[Any], ...] = (np.dtype("uint8"), np.dtype("int16"))


def dtype_for(num_experts: int) -> np.dtype[Any]:
    """The shortest type that holds the ids of so many experts."""
    return DTYPES[0] if num_experts <= 256 else DTYPES[1]


def check_routing(routing: np.ndarray, num_tokens: int, layers: int, top_k: int, num_experts: int) -> None:
    """ValueError unless the array belongs to so many tokens of a model of that size; it says what was found."""
    wanted = (num_tokens - 1, layers, top_k)
    if routing.shape != wanted:
        raise ValueError(
            f"routing has shape {list(routing.shape)}, not {list(wanted)}: tokens but the last, layers, top_k"
        )
    if routing.dtype not in DTYPES:
        raise ValueError(f"routing is of {routing.dtype}; it must be uint8 or int16")
    if routing.size and not 0 <= int(routing.min()) <= int(routing.max()) < num_experts:
        wrong = int(routing.min()) if int(routing.min()) < 0 else int(routing.max())
        raise ValueError(f"routing holds expert {wrong}; the model has {num_experts}")
    ordered = np.sort(routing, axis=-1)
    if bool((ordered[..., 1:] == ordered[..., :-1]).any()):
        raise ValueError("routing holds one expert twice for a token")
