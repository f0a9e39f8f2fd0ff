# SPDX-License-Identifier: BSD-3-Clause
"""Peak memory of this process, from a chosen moment on."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

_RESET = Path("/proc/self/clear_refs")


class Peak:
    """How much more memory than at construction was in use at the worst moment since.

    On CUDA what torch's allocator handed out; on the CPU, under Linux, resident memory as the
    kernel counts it, pages that an allocator keeps included; elsewhere nothing is known.
    """

    def __init__(self, device: torch.device) -> None:
        """Forget the highest value so far."""
        self._device = device
        self._start: int | None = None
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        elif device.type == "cpu":
            with suppress(OSError):  # not Linux, or a sandbox without this file
                _RESET.write_text("5", encoding="ascii")  # proc(5): resets VmHWM
                self._start = proc_bytes("self/status", "VmRSS")

    def bytes(self) -> int | None:
        """Return the peak so far; ``None`` where there is no way to tell."""
        if self._start is None:
            return None
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return proc_bytes("self/status", "VmHWM") - self._start


def proc_bytes(file: str, key: str) -> int:
    """Read one of the sizes that Linux tells in kilobytes.

    Raises:
        OSError: There is no such file here.
    """
    lines = Path("/proc", file).read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def bytes_of(tensors: Iterable[object]) -> int:
    """Bytes of the elements of tensors; what is none is passed over."""
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, torch.Tensor))
