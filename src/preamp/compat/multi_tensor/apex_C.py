# SPDX-License-Identifier: BSD-3-Clause
"""``apex_C``: several dense tensors as one, and back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

__all__ = ["flatten", "unflatten"]


def flatten(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return all elements of ``tensors`` in one dimension, in order.

    As ``flatten_dense_tensors`` of torch: differentiable, each tensor in row-major order.
    They are dense, of one dtype and device; the result has memory of its own.
    """
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def unflatten(flat: torch.Tensor, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of ``flat`` with the shapes of ``tensors``, in order.

    Args:
        flat: One dimension, at least as many elements as all of ``tensors``.
        tensors: Give the shapes; not read.

    Returns:
        One view for each tensor.
    """
    ends = list(itertools.accumulate(tensor.numel() for tensor in tensors))
    # Not split(): of views made by one call torch refuses to change any in place.
    return [
        flat.narrow(0, end - tensor.numel(), tensor.numel()).view(tensor.shape)
        for tensor, end in zip(tensors, ends, strict=True)
    ]
