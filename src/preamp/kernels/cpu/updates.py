# SPDX-License-Identifier: BSD-3-Clause
"""What the update rules share on CPUs: skipping, cutting, loading and storing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.cpu.blocks import Block, Column, Part, copy_, parts, regular
from preamp.kernels.joining import stack
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot
from preamp.kernels.rules import Scalar, Update

_torch: Any = torch
_PARAM, _GRAD, _STATE = 0, 1, 2  # columns; halves come last


class Work:
    """The lists of one update, with what cannot be walked through in blocks taken out.

    Attributes:
        columns: Parameters, gradients, state …, halves; contiguous.
        odd: The places left out of them.
    """

    def __init__(self, update: Update, params: Tensors, grads: Tensors, *state: Tensors) -> None:
        """Sort; nothing is written."""
        halves: Column = [None] * len(params) if update.halves is None else update.halves
        self._given: tuple[Column, ...] = (params, grads, *state, halves)
        self._update = update
        self.columns, self.odd = regular(*self._given)

    def leave_odd_to(self, op: Callable[..., None], rule: Any) -> None:
        """Let the reference's ``op`` update the places that were taken out."""
        if self.odd:
            *lists, halves = ([column[i] for i in self.odd] for column in self._given)
            op(*lists, rule=rule, update=replace(self._update, halves=halves))

    def parts(self, block: int) -> Iterator[Part]:
        """Cut the columns."""
        return parts(block, *self.columns)

    @property
    def dtype(self) -> torch.dtype:
        """Of the computation."""
        return math_dtype(self.columns[_PARAM][0].dtype) if self.columns[_PARAM] else torch.float32

    def fits_fused(self) -> bool:
        """Whether parameters and state have the precision of the computation."""
        wide = [column[0] for column in (self.columns[0], *self.columns[_STATE:-1]) if column]
        return all(tensor.dtype is self.dtype for tensor in wide)


class BlockSlot(Slot):
    """A block as the reference's formulas take it."""

    def __init__(self, block: Block, dtype: torch.dtype, inv_scale: torch.Tensor | None) -> None:
        """Load; nothing is written before `store`."""
        self._block = block
        self.p = block.flat(_PARAM, dtype)
        self.g = block.flat(_GRAD, dtype)
        if inv_scale is not None:
            self.g = self.g * inv_scale.to("cpu", dtype)
        states = range(_STATE, len(block.columns) - 1)
        self.state = tuple(block.flat(column, dtype) for column in states)

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """One value for each tensor of the block, as a factor of ``p``."""
        return self._block.spread(each)

    def norms(self, values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        """The norm of each of the block's tensors, of which ``values`` has the elements."""
        return stack(_torch._foreach_norm(self._block.split(values), order))

    def store(self, p: torch.Tensor, *state: torch.Tensor) -> None:
        """See `Slot.store`."""
        for column, values in enumerate(state, _STATE):
            self._block.write(column, values)
        self._block.write(_PARAM, p)
        self._block.copy_column(_PARAM, -1)


class WideGradients:
    """Gradients as torch's fused kernels take them: unscaled, in the precision of the computation.

    They lie in one buffer of a block's size, which the next block overwrites.
    """

    def __init__(self, dtype: torch.dtype, inv_scale: torch.Tensor | None) -> None:
        """Make no buffer yet."""
        self._dtype = dtype
        self._inv_scale = None if inv_scale is None else inv_scale.to("cpu", dtype)
        self._buffer = torch.empty(0, dtype=dtype)

    def of(self, block: Block) -> Sequence[torch.Tensor]:
        """Those of ``block``; its own if nothing has to be done to them."""
        grads: list[torch.Tensor] = block.columns[_GRAD]
        if self._inv_scale is None and grads[0].dtype is self._dtype:
            return grads
        if self._buffer.numel() < block.numel:
            self._buffer = torch.empty(block.numel, dtype=self._dtype)
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


def number(value: Scalar) -> float:
    """A hyper-parameter as a number."""
    return float(value.item()) if isinstance(value, torch.Tensor) else float(value)


def norms_over(
    part: Part, of_block: Callable[[Block], tuple[torch.Tensor, ...]], order: float = 2.0
) -> list[torch.Tensor]:
    """Norms of each tensor of a part, from those of its blocks."""
    found = [of_block(block) for block in part.blocks]
    if len(found) == 1:
        return list(found[0])
    total = _torch.linalg.vector_norm
    return [total(stack(pieces), order, dim=0) for pieces in zip(*found, strict=True)]
