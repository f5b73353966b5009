"""A model that leaves the device for the host's memory, and comes back, under the references that others hold."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


class HostSwap:
    """Moves the tensors of one model to the host's memory and back to its device, in place: every reference stays good.

    `tensors` lists them when asked, as an optimizer makes its state late. A repeated call does nothing, so that a
    retried step is harmless. On a CPU nothing moves.
    """

    def __init__(self, device: torch.device, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._device = device
        self._tensors = tensors
        self.asleep = False
        self.moves = 0
        """Times that the tensors were moved."""

    def sleep(self) -> None:
        """Leave the device."""
        if not self.asleep:
            self._move(torch.device("cpu"))
            self.asleep = True

    def wake(self) -> None:
        """Come back."""
        if self.asleep:
            self._move(self._device)
            self.asleep = False

    @torch.no_grad()
    def _move(self, target: torch.device) -> None:
        self.moves += 1
        if self._device.type == "cpu":
            return
        seen: set[int] = set()
        for tensor in self._tensors():
            if id(tensor) not in seen:
                seen.add(id(tensor))
                tensor.data = tensor.data.to(target)
        if target.type == "cpu":
            torch.cuda.empty_cache()
