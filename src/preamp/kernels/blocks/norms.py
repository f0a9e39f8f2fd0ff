# SPDX-License-Identifier: BSD-3-Clause
"""Norms of lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from preamp.kernels.reference.update import LONG, has_long_sums, norm

_torch: Any = torch
_numel_of = torch.Tensor.numel


def norms_of(
    tensors: Sequence[torch.Tensor], order: float = 2.0, dtype: torch.dtype | None = None
) -> list[torch.Tensor]:
    """The norm of each tensor, scalars; all tensors have one dtype and device, and none is empty.

    In one call but for tensors that it would lose digits of, see `norm`.
    """
    if (
        order != 2.0
        or not tensors
        or not has_long_sums(tensors[0].device, max(map(_numel_of, tensors)))
    ):
        return _torch._foreach_norm(tensors, order, dtype)
    short = [tensor for tensor in tensors if tensor.numel() <= LONG]
    found = iter(_torch._foreach_norm(short, order, dtype) if short else ())
    return [next(found) if t.numel() <= LONG else norm(t, dtype) for t in tensors]
