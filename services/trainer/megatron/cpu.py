"""Lets megatron-core run on a host without CUDA, which it asks for by name: for development and tests.

Everything holds inside of `host_devices()` only, and nothing is done where CUDA is available.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer.moe import token_dispatcher
from torch import Tensor
from torch.overrides import TorchFunctionMode

_HOST = torch.device("cpu")
_TYPES = {torch.float32: "FloatTensor", torch.bfloat16: "BFloat16Tensor", torch.float16: "HalfTensor"}


class ShimRefused(RuntimeError):
    """The shim was asked for on a machine that has CUDA."""


def devices(kind: str) -> AbstractContextManager[None]:
    """What must surround every call into megatron-core on a device of that kind, "cpu" or "cuda"."""
    return host_devices() if kind == "cpu" else nullcontext()


@contextmanager
def host_devices() -> Iterator[None]:
    """Inside, "cuda" means the host. ShimRefused where CUDA is available: set trainer.device = "cuda" there."""
    if torch.cuda.is_available():
        raise ShimRefused('this machine has CUDA: run backend = "megatron" with trainer.device = "cuda"')
    with ExitStack() as stack:
        for name, value in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(megatron_random, "_CUDA_RNG_STATE_TRACKER", _NoRandomness()))
        stack.enter_context(mock.patch.object(megatron_random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True))
        stack.enter_context(mock.patch.object(token_dispatcher, "maybe_move_tensor_to_cpu", _moved))
        stack.enter_context(mock.patch.object(dist, "all_gather", _all_gather))
        stack.enter_context(mock.patch.object(dist, "reduce_scatter", _reduce_scatter))
        stack.enter_context(_OnHost())
        yield


_gather, _scatter = dist.all_gather, dist.reduce_scatter


def _all_gather(outputs: list[Tensor], own: Tensor, group: Any = None, **named: Any) -> Any:
    """Also of unequal lengths, which NCCL gathers and gloo does not: tokens for the experts that ranks share."""
    lengths = [len(item) for item in outputs]
    if len(set(lengths)) == 1:
        return _gather(outputs, own, group=group, **named)
    longest = max(lengths)
    padded = torch.cat([own, own.new_zeros(longest - len(own), *own.shape[1:])])
    parts = [torch.empty_like(padded) for _ in outputs]
    _gather(parts, padded, group=group)
    for output, part in zip(outputs, parts, strict=True):
        output.copy_(part[: len(output)])
    return None


def _reduce_scatter(output: Tensor, inputs: list[Tensor], *arguments: Any, group: Any = None, **named: Any) -> Any:
    """Also of unequal lengths; sums."""
    if len({len(item) for item in inputs}) == 1:
        return _scatter(output, inputs, *arguments, group=group, **named)
    whole = torch.cat(inputs)
    dist.all_reduce(whole, group=group)
    output.copy_(whole.split([len(item) for item in inputs])[dist.get_rank(group)])
    return None


class _OnHost(TorchFunctionMode):
    """Replaces CUDA devices in the arguments of torch functions."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _HOST
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.to:
            args = tuple(_HOST if _is_cuda(item) else item for item in args)
        if func is Tensor.type and len(args) == 1 and not kwargs:
            return f"torch.cuda.{_TYPES.get(args[0].dtype, 'Tensor')}"
        return func(*args, **kwargs)


class _NoRandomness:
    """Stands for the generators of tensor-parallel regions, which models without dropout never draw from."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        del name
        return nullcontext()

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, Any]:
        return {}


class _Stream:
    """A stream of work that is done when it is asked for."""

    def __init__(self, *arguments: Any, **named: Any) -> None: ...

    def wait_stream(self, other: Any) -> None: ...

    def record_event(self, event: Any = None) -> _Stream:
        return self

    def synchronize(self) -> None: ...


_STREAM = _Stream()
_CUDA: dict[str, Any] = {
    "current_device": lambda: _HOST,
    "synchronize": lambda device=None: None,
    "current_stream": lambda device=None: _STREAM,
    "default_stream": lambda device=None: _STREAM,
    "Stream": _Stream,
    "stream": lambda stream: nullcontext(),
}


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


def _moved(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Sizes for a collective, as numbers: megatron-core only makes numbers of what was on a GPU."""
    del record_stream
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor
