# SPDX-License-Identifier: BSD-3-Clause
"""Sort the places of tensor lists by the launch that can take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

from preamp.kernels.geometry import OWN_MEMORY

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What kernels load and store."""

T = TypeVar("T")
Row = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Group:
    """Places that one launch takes: all on one device, their dtypes equal list by list."""

    device: torch.device  # where they are
    dtypes: tuple[torch.dtype | None, ...]  # dtype of each list, ``None`` where it has no tensors
    rows: tuple[list[torch.Tensor], ...]  # the lists
    # which places of the caller's lists these are
    positions: list[int] = field(default_factory=list[int])


def sort(*lists: Row, scalars: int = 0) -> tuple[list[Group], list[int]]:
    """Return the groups, and the places that kernels cannot take.

    A kernel walks memory in storage order. So the tensors of a place must be dense, with equal
    strides, on one device, of `DTYPES`, and lie in memory of their own. The first list has a
    tensor in every place; the last ``scalars`` lists hold 0-dim tensors.
    """
    groups: dict[tuple[object, ...], Group] = {}
    others: list[int] = []
    shaped = len(lists) - scalars
    for position, place in enumerate(zip(*lists, strict=True)):
        dtypes = _dtypes(place, shaped)
        if dtypes is None:
            others.append(position)
            continue
        device = cast("torch.Tensor", place[0]).device
        group = groups.get((device, dtypes))
        if group is None:
            group = groups[device, dtypes] = Group(device, dtypes, tuple([[] for _ in place]))
        group.positions.append(position)
        for row, tensor in zip(group.rows, place, strict=True):
            if tensor is not None:
                row.append(tensor)
    return list(groups.values()), others


def pick(row: Sequence[T], positions: Sequence[int]) -> list[T]:
    """The tensors of ``row`` at ``positions``."""
    return [row[position] for position in positions]


def _dtypes(place: Row, shaped: int) -> tuple[torch.dtype | None, ...] | None:
    """A place's dtypes, ``None`` if kernels cannot take it; a plain loop, as all steps run it."""
    first = cast("torch.Tensor", place[0])
    device, shape = first.device, first.shape
    dtypes: list[torch.dtype | None] = []
    is_contiguous = True
    for index, tensor in enumerate(place):
        if tensor is None:
            dtypes.append(None)
            continue
        dtype = tensor.dtype
        if dtype not in DTYPES or tensor.layout is not torch.strided or tensor.is_neg():
            return None
        if type(tensor) not in OWN_MEMORY and tensor.numel() and not tensor.data_ptr():
            return None  # a wrapper around other tensors, such as DTensor
        if tensor.device != device or (index < shaped and tensor.shape != shape):
            return None
        is_contiguous = is_contiguous and tensor.is_contiguous()
        dtypes.append(dtype)
    return tuple(dtypes) if is_contiguous or _walk_alike(place[:shaped]) else None


def _walk_alike(place: Row) -> bool:
    """Whether the tensors are dense and have their elements in the same order."""
    orders = [_steps(tensor) for tensor in place if tensor is not None]
    return _dense(orders[0]) and all([order == orders[0] for order in orders])


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Stride and size of each dimension that is walked along."""
    dimensions = zip(tensor.stride(), tensor.shape, strict=True)
    return [(stride, size) for stride, size in dimensions if size != 1]


def _dense(steps: list[tuple[int, int]]) -> bool:
    """Whether memory is covered once, without gaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted(steps):
        if stride != expected:
            return False
        expected *= size
    return True
