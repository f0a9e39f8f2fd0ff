# SPDX-License-Identifier: BSD-3-Clause
"""Sort the places of tensor lists by the launch that can take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""What kernels load and store."""

T = TypeVar("T")
Row = Sequence[torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Group:
    """Places that one launch takes: all on one device, their dtypes equal list by list.

    Attributes:
        device: Where they are.
        dtypes: dtype of each list, ``None`` where it has no tensors.
        rows: The lists.
        positions: Which places of the caller's lists these are.
    """

    device: torch.device
    dtypes: tuple[torch.dtype | None, ...]
    rows: tuple[list[torch.Tensor], ...]
    positions: list[int] = field(default_factory=list[int])


def sort(*lists: Row, scalars: int = 0) -> tuple[list[Group], list[int]]:
    """Return the groups, and the places that kernels cannot take.

    A kernel walks memory in storage order. So the tensors of a place must be dense, with equal
    strides, on one device, and of `DTYPES`.

    Args:
        lists: Equally long; the first one has a tensor in every place.
        scalars: How many of the lists, at the end, hold 0-dim tensors.
    """
    groups: dict[tuple[object, ...], Group] = {}
    others: list[int] = []
    for position, place in enumerate(zip(*lists, strict=True)):
        first = cast("torch.Tensor", place[0])
        shaped = place[: len(place) - scalars]
        if not (_loadable(first.device, place) and _walkable(first, shaped)):
            others.append(position)
            continue
        dtypes = tuple([None if t is None else t.dtype for t in place])
        key = (first.device, dtypes)
        if key not in groups:
            groups[key] = Group(first.device, dtypes, tuple([] for _ in place))
        group = groups[key]
        group.positions.append(position)
        for row, tensor in zip(group.rows, place, strict=True):
            if tensor is not None:
                row.append(tensor)
    return list(groups.values()), others


def pick(row: Sequence[T], positions: Sequence[int]) -> list[T]:
    """The tensors of ``row`` at ``positions``."""
    return [row[position] for position in positions]


def _loadable(device: torch.device, place: Row) -> bool:
    return all(
        [
            tensor is None
            or (
                tensor.dtype in DTYPES
                and tensor.layout is torch.strided
                and tensor.device == device
                and not tensor.is_neg()
            )
            for tensor in place
        ]
    )


def _walkable(first: torch.Tensor, place: Row) -> bool:
    tensors = [tensor for tensor in place if tensor is not None]
    if any([tensor.shape != first.shape for tensor in tensors]):
        return False
    if all([tensor.is_contiguous() for tensor in tensors]):
        return True
    steps = _steps(first)
    return _dense(steps) and all([_steps(tensor) == steps for tensor in tensors])


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
