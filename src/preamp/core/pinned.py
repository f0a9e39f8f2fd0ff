# SPDX-License-Identifier: BSD-3-Clause
"""Memory of the host that a CUDA device copies from and to without the host waiting."""

from __future__ import annotations

import torch

from preamp.core.errors import unavailable
from preamp.core.tensors import memory_order


def pinned(size: int, what: str, allowed: str, do: str) -> torch.Tensor:
    """Return ``size`` bytes of it; see `bytes_reserved`.

    Raises:
        PreampUnavailableError: The host has none to give for ``what``; ``allowed`` and ``do`` say
            how much is needed, and what to do.
    """
    try:
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise unavailable(
            f"The host has no {size} bytes of pinned memory for {what}: {error}", allowed, do
        ) from error


def bytes_reserved(*needs: tuple[int, int]) -> int:
    """What torch reserves for buffers that are needed at different times.

    Each need is the bytes of one and how many there are. torch takes a power of two for each, and
    gives it to whoever needs one of that size next.
    """
    most: dict[int, int] = {}
    for size, count in needs:
        whole = 1 << max(size - 1, 0).bit_length()
        most[whole] = max(most.get(whole, 0), count)
    return sum(whole * count for whole, count in most.items())


def laid_as(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    """View a vector in the shape of ``tensor``, elements in the order of its memory, no gaps."""
    order = memory_order(tensor)
    laid = flat.view([tensor.shape[dim] for dim in order])
    return laid.permute([order.index(dim) for dim in range(len(order))])
