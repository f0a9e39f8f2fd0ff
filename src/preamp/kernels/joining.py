# SPDX-License-Identifier: BSD-3-Clause
"""Joining tensors of one dtype, which torch.autocast is kept out of.

It would cast what is joined, and refuses float64. Forms with ``out`` it leaves alone, and the
functions behind the public names are not wrapped for O1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_torch: Any = torch


def cat(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.cat`` of vectors of one dtype and device, at least one."""
    size = sum(vector.numel() for vector in vectors)
    out = torch.empty(size, dtype=vectors[0].dtype, device=vectors[0].device)
    return _torch._C._VariableFunctions.cat(vectors, out=out)


def stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """``torch.stack`` of tensors of one shape, dtype and device, at least one."""
    first = tensors[0]
    out = torch.empty((len(tensors), *first.shape), dtype=first.dtype, device=first.device)
    return _torch._C._VariableFunctions.stack(tensors, out=out)
