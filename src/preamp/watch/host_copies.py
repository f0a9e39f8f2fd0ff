# SPDX-License-Identifier: BSD-3-Clause
"""Small tensors on their way to the host, without anybody waiting for them."""

from __future__ import annotations

import torch

from preamp.core.tensors import host_reaches


class HostCopies:
    """Numbers computed now and read later: in pinned memory on CUDA, else where they are."""

    def __init__(self) -> None:
        """Start without numbers."""
        self._tensors: list[torch.Tensor] = []
        self._events: dict[torch.device, torch.cuda.Event] = {}
        self._are_elsewhere = False

    def put(self, tensor: torch.Tensor) -> int:
        """Send ``tensor``, which nobody writes to any more, off; returns its number."""
        device = tensor.device
        if device.type == "cuda":
            pinned = torch.empty_like(tensor, device="cpu", pin_memory=True)
            pinned.copy_(tensor, non_blocking=True)
            tensor = pinned
            event = self._events.setdefault(device, torch.cuda.Event())
            event.record(torch.cuda.current_stream(device))
        elif not host_reaches(tensor):
            self._are_elsewhere = True
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def have_come(self, *, late: bool = False) -> bool:
        """Whether reading waits for nothing; ``late`` believes it of devices that cannot tell."""
        if self._are_elsewhere and not late:
            return False
        return all(event.query() for event in self._events.values())

    def number(self, place: int) -> float:
        """The value of a scalar. Waits for it."""
        return float(self[place].item())

    def __getitem__(self, number: int) -> torch.Tensor:
        """The tensor with this number, on the CPU. Waits for it."""
        for event in self._events.values():
            event.synchronize()
        return self._tensors[number].cpu()
