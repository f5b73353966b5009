"""A rank's place among the others, and the few small collectives that every distributed backend needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from services.trainer.loss_metrics import merge

CONTROL_TIMEOUT = timedelta(days=365)
"""Idle ranks wait in a broadcast on the control group. A rank that dies is noticed by its closed connection."""
COMPUTE_TIMEOUT = timedelta(minutes=15)
"""Longest that one rank may be behind another inside a pass."""


def group_kind(device: torch.device) -> str:
    """Gloo for the host, and NCCL beside it for GPUs."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


@dataclass(frozen=True)
class World:
    """`control` is a gloo group over all ranks for commands and numbers on the host; None for one rank."""

    rank: int
    size: int
    local_rank: int
    device: torch.device
    control: Any = None

    @classmethod
    def single(cls, device: str = "cpu") -> World:
        """The world of one process."""
        return cls(0, 1, 0, torch.device(device))

    @classmethod
    def join(cls, rank: int, size: int, local_rank: int, device: str, store: Any) -> World:
        """Meet the other ranks at `store`. Gloo on the host, NCCL beside it where `device` is CUDA."""
        place = torch.device(device)
        if place.type == "cuda":
            place = torch.device("cuda", local_rank)
            torch.cuda.set_device(place)
        dist.init_process_group(group_kind(place), store=store, rank=rank, world_size=size, timeout=COMPUTE_TIMEOUT)
        return cls(rank, size, local_rank, place, dist.new_group(backend="gloo", timeout=CONTROL_TIMEOUT))

    def broadcast(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank."""
        if self.size == 1:
            return data or b""
        length = torch.tensor([len(data) if data is not None else 0])
        dist.broadcast(length, 0, group=self.control)
        content = torch.empty(int(length), dtype=torch.uint8)
        if data:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if len(content):
            dist.broadcast(content, 0, group=self.control)
        return content.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """The bytes of every rank in order, on every rank."""
        if self.size == 1:
            return [data]
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]), group=self.control)
        longest = max(1, *(int(item) for item in lengths))
        padded = torch.frombuffer(bytearray(data.ljust(longest, b"\0")), dtype=torch.uint8)
        parts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(parts, padded, group=self.control)
        return [part[: int(length)].numpy().tobytes() for part, length in zip(parts, lengths, strict=True)]

    def merge_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Metrics over all ranks, in the order of ranks and so the same bits everywhere. Names may differ."""
        if self.size == 1:
            return dict(metrics)
        total: dict[str, float] = {}
        for part in self.gather(json.dumps({name: float(value) for name, value in metrics.items()}).encode()):
            merge(total, json.loads(part))
        return total

    def sum_arrays(self, parts: Sequence[np.ndarray]) -> None:
        """Add the float32 arrays of all ranks, in place. Exact where all but one rank hold zeros."""
        if self.size == 1 or not parts:
            return
        flat = torch.from_numpy(np.concatenate([part.reshape(-1) for part in parts]))
        dist.all_reduce(flat, group=self.control)
        start = 0
        for part in parts:
            part[...] = flat[start : start + part.size].numpy().reshape(part.shape)
            start += part.size

    def leave(self) -> None:
        """End the process groups. Left to the end of the interpreter, their threads may abort the process."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.size > 1:
            dist.barrier(group=self.control)
