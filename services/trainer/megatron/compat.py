"""What megatron-core 0.16.1 gets wrong without Transformer Engine and apex, on GPUs too: a function or class a fix.

Each has a test that fails without it (tests/numerics/test_megatron_compat.py), so that a newer megatron-core shows
which are still needed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn


def silence_warnings() -> None:
    """megatron-core warns in each module that it found neither of the two, and at calls that its own code makes."""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.core")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"megatron\.core")


class Norm(nn.RMSNorm):
    """RMS norm that may stand between sequence-parallel regions, which megatron-core's own wrapper of it refuses.

    The mark on its weight has the ranks' gradients summed, as each has seen its part of the tokens only.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.cuda.current_device())
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def define_missing_gemm() -> None:
    """The router of experts asks for a name that is defined with Transformer Engine only."""
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # type: ignore[attr-defined]


def mark_shared(parameter: nn.Parameter, axis: int | None) -> None:
    """Say that tensor ranks have different parts of a parameter. Only random initialization would, and without it the
    norm of the gradient takes the part of the first rank for the whole.
    """
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes

    if axis is not None and not hasattr(parameter, "tensor_model_parallel"):
        set_tensor_model_parallel_attributes(parameter, True, axis, 1)


def set_weight_decay(optimizer: Any, weight_decay: float) -> None:
    """Vectors are not decayed. The optimizer only notes their factor 0; a scheduler of megatron-core would apply it."""
    for group in optimizer.param_groups:
        group["weight_decay"] = weight_decay * group["wd_mult"]
