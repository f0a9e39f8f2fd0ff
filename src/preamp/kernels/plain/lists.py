# SPDX-License-Identifier: BSD-3-Clause
"""Lists of tensors as the formulas of the rules take them, and how long lists are cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch

from preamp.core.tensors import in_memory_order
from preamp.kernels.ops import Column

_torch: Any = torch
_is_contiguous = torch.Tensor.is_contiguous

TOGETHER = 512
"""Most tensors of a run: with more of them their Python objects no longer stay in the cache."""


class Lists:
    """Tensors that arithmetic is done on together, each rounded as if it were alone.

    The other operand is as many tensors, or one number or 0-dim tensor for all.
    """

    __slots__ = ("each",)

    def __init__(self, each: Sequence[torch.Tensor]) -> None:
        self.each = each

    def _with(self, run: Callable[..., Sequence[torch.Tensor]], other: Any) -> Lists:
        return Lists(run(self.each, other.each if isinstance(other, Lists) else other))

    def __add__(self, other: Any) -> Lists:
        return self._with(_torch._foreach_add, other)

    def __mul__(self, other: Any) -> Lists:
        return self._with(_torch._foreach_mul, other)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Any) -> Lists:
        return self._with(_torch._foreach_sub, other) if isinstance(other, Lists) else self + -other

    def __truediv__(self, other: Any) -> Lists:
        return self._with(_torch._foreach_div, other)

    def sqrt(self) -> Lists:
        """The square roots."""
        return Lists(_torch._foreach_sqrt(self.each))


def choose(condition: bool | torch.Tensor, a: Lists, b: Lists) -> Lists:
    """One of two lists, by a condition for all."""
    if isinstance(condition, bool):
        return a if condition else b
    pairs = zip(a.each, b.each, strict=True)
    return Lists([torch.where(condition, *pair) for pair in pairs])


class Run(NamedTuple):
    """Some places of lists, or pieces of large tensors."""

    places: list[int]  # of each where it stands, or the tensor that it is a piece of
    columns: list[list[Any]]
    is_flat: bool  # whether all are contiguous


def runs(columns: Sequence[Column], most: int, *, cuts: bool = True) -> Iterator[Run]:
    """Walk lists in runs of about ``most`` elements.

    Tensors that are larger are cut, where all of a place lie alike and densely. Without ``cuts``
    they stay as they are.
    """
    run = Run([], [[] for _ in columns], is_flat=True)
    total = 0
    for place, row in enumerate(zip(*columns, strict=True)):
        row = [t.detach() if t is not None and t.requires_grad else t for t in row]
        size = cast("torch.Tensor", row[0]).numel()
        is_flat, rows = _pieces(row, most) if cuts else (False, [row])
        for piece in rows:
            count = min(size, most)
            is_full = total + count > most or len(run.places) == TOGETHER
            if run.places and (is_full or is_flat is not run.is_flat):
                yield run
                run, total = Run([], [[] for _ in columns], is_flat), 0
            run = run._replace(is_flat=is_flat) if not run.places else run
            run.places.append(place)
            for column, tensor in zip(run.columns, piece, strict=True):
                column.append(tensor)
            total += count
    if run.places:
        yield run


def _pieces(row: Sequence[Any], most: int) -> tuple[bool, Sequence[Sequence[Any]]]:
    """Whether all are contiguous, in the order of memory at least, and what a place is cut into."""
    there = [tensor for tensor in row if tensor is not None]
    if any([tensor.layout is not torch.strided for tensor in there]):
        return False, [row]
    is_flat = all(map(_is_contiguous, there))
    size = there[0].numel()
    if (is_flat and size <= most) or len({tensor.stride() for tensor in there}) > 1:
        return is_flat, [row]
    try:
        flat = [None if tensor is None else in_memory_order(tensor) for tensor in row]
    except RuntimeError:  # not dense
        return False, [row]
    if not all([vector is None or vector.is_contiguous() for vector in flat]):
        return False, [row]  # a vector with gaps, of which torch makes a view all the same
    if size <= most:
        return True, [flat]
    parts = [None if vector is None else cast("Any", vector).split(most) for vector in flat]
    count = -(-size // most)
    return True, [[None if part is None else part[i] for part in parts] for i in range(count)]
