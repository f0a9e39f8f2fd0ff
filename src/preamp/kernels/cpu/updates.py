# SPDX-License-Identifier: BSD-3-Clause
"""What the update rules share on CPUs: reading numbers, and gradients for torch's fused kernels."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from preamp.kernels.foreach.blocks import Block, copy_
from preamp.kernels.rules import Scalar, Update

_GRAD = 1


class WideGradients:
    """Gradients as torch's fused kernels take them: unscaled, in the precision of the computation.

    They lie in one buffer of a block's size, which the next block overwrites.
    """

    def __init__(self, dtype: torch.dtype, inv_scale: torch.Tensor | None) -> None:
        """Make no buffer yet."""
        self._dtype = dtype
        self._inv_scale = None if inv_scale is None else inv_scale.to("cpu", dtype)
        self._buffer = torch.empty(0, dtype=dtype, device="cpu")

    def of(self, block: Block) -> Sequence[torch.Tensor]:
        """Those of ``block``; its own if nothing has to be done to them."""
        grads: list[torch.Tensor] = block.columns[_GRAD]
        if self._inv_scale is None and grads[0].dtype is self._dtype:
            return grads
        if self._buffer.numel() < block.numel:
            self._buffer = torch.empty(block.numel, dtype=self._dtype, device="cpu")
        wide = self._buffer[: block.numel]
        pieces = block.split(wide)
        if len(grads) == 1 and grads[0].dtype is self._dtype and self._inv_scale is not None:
            torch.mul(grads[0], self._inv_scale, out=pieces[0])
            return pieces
        copy_(pieces, grads)
        if self._inv_scale is not None:
            wide.mul_(self._inv_scale)
        return pieces


def is_skipped(update: Update) -> bool:
    """Whether ``found_inf`` is set; the CPU reads its own memory without waiting."""
    return update.found_inf is not None and bool(update.found_inf.item() != 0)


def constant(value: float) -> torch.Tensor:
    """A number as torch's fused kernels take the step, whatever the default dtype and device."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def number(value: Scalar) -> float:
    """A hyper-parameter as a number."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)
