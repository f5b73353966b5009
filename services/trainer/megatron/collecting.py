"""Brings the tensors that the ranks hold to rank 0, one at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.trainer.megatron.parameters import Found
from services.trainer.ranks.world import World


def collect(own: Iterator[Found], world: World) -> dict[str, Tensor]:
    """All tensors by name, on rank 0's host; empty elsewhere. Rows of one tensor are put together. Collective."""
    found: dict[str, Tensor] = {}
    mine = list(own)
    listed: list[list[dict[str, Any]]] = [json.loads(part) for part in world.gather(json.dumps(_list(mine)).encode())]
    for rank, items in enumerate(listed):
        for number, item in enumerate(items):
            if world.rank == rank == 0:
                _place(found, item, mine[number].tensor)
            elif world.rank == rank:
                dist.send(mine[number].tensor, 0, group=world.control)
            elif world.rank == 0:
                tensor = torch.empty(item["shape"], dtype=getattr(torch, item["dtype"]))
                dist.recv(tensor, rank, group=world.control)
                _place(found, item, tensor)
    return found


def _list(items: list[Found]) -> list[dict[str, Any]]:
    return [
        {
            "name": item.name, "shape": list(item.tensor.shape), "dtype": str(item.tensor.dtype).removeprefix("torch."),
            "start": item.piece.start if item.piece else 0,
            "whole": list(item.piece.shape) if item.piece else list(item.tensor.shape),
        }
        for item in items
    ]  # fmt: skip


def _place(found: dict[str, Tensor], item: dict[str, Any], tensor: Tensor) -> None:
    if item["shape"] == item["whole"]:
        found[item["name"]] = tensor
        return
    if item["name"] not in found:
        found[item["name"]] = torch.empty(item["whole"], dtype=tensor.dtype)
    whole = found[item["name"]]
    whole[item["start"] : item["start"] + len(tensor)] = tensor
