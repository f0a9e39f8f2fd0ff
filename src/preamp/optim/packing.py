# SPDX-License-Identifier: BSD-3-Clause
"""Float32 masters as half weights and what is beside these, and back, block by block."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from preamp.kernels.reference.tally import blocks_of
from preamp.kernels.stored import join, split
from preamp.optim.part import in_memory_order


def packed(wide: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
    """Round ``wide`` into ``half``, and return the int16 tensor to keep beside it."""
    low = torch.empty_like(half, dtype=torch.int16)
    for source, target, rest in _blocks(wide, half, low):
        rounded, beyond = split(source, half.dtype)
        target.copy_(rounded)
        rest.copy_(beyond)
    return low


def round_into(wide: torch.Tensor, half: torch.Tensor) -> None:
    """Round ``wide`` into ``half`` as `packed` does."""
    for source, target in _blocks(wide, half):
        target.copy_(split(source, half.dtype)[0])


def unpacked(half: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
    """Return the float32 values of half weights and what is beside them."""
    wide = torch.empty_like(half, dtype=torch.float32)
    for target, source, rest in _blocks(wide, half, low):
        target.copy_(join(source, rest))
    return wide


def _blocks(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Views of tensors of one shape, so that no temporary is as large as the whole."""
    alike = len({tensor.stride() for tensor in tensors}) == 1
    try:
        flat = [in_memory_order(tensor) for tensor in tensors] if alike else []
    except RuntimeError:  # not dense
        flat = []
    if not flat:
        yield tensors
        return
    yield from zip(*map(blocks_of, flat), strict=True)
