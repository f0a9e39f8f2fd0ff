# SPDX-License-Identifier: BSD-3-Clause
"""The ways in which the elements of a tensor may lie in memory."""

import math

import torch


def plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """Every other element is somebody else's."""
    return torch.stack([tensor, torch.full_like(tensor, math.nan)], dim=-1)[..., 0]


def unaligned(tensor: torch.Tensor) -> torch.Tensor:
    """A view that starts one element into its memory."""
    return torch.cat([torch.zeros(1, dtype=tensor.dtype), tensor.reshape(-1)])[1:].view_as(tensor)


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def unaligned_transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Dense in another order, and in the midst of somebody else's memory."""
    return unaligned(tensor.mT).mT if tensor.dim() > 1 else tensor


LAYOUTS = (plain, strided, unaligned, transposed, unaligned_transposed, channels_last)
