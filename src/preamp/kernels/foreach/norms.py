# SPDX-License-Identifier: BSD-3-Clause
"""Norms of lists of tensors."""

from __future__ import annotations

from typing import Any

import torch

from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import has_long_sums, norm

_torch: Any = torch


def norms_of(
    tensors: Tensors, order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The norm of each tensor, scalars; all tensors have one dtype, and none is empty.

    In one call but for tensors that it would lose digits of, see `norm`.
    """
    is_long = [order == 2.0 and has_long_sums(tensor) for tensor in tensors]
    if not any(is_long):
        return _torch._foreach_norm(tensors, order, dtype)
    short = [tensor for tensor, long in zip(tensors, is_long, strict=True) if not long]
    found = iter(_torch._foreach_norm(short, order, dtype) if short else ())
    return [
        norm(tensor, dtype) if long else next(found)
        for tensor, long in zip(tensors, is_long, strict=True)
    ]
