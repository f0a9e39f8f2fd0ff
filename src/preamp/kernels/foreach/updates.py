# SPDX-License-Identifier: BSD-3-Clause
"""What the update rules share in blocks: cutting, loading, storing, norms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.foreach.blocks import (
    Block,
    Column,
    Part,
    check_lengths,
    check_shapes,
    parts,
    regular,
)
from preamp.kernels.foreach.norms import norms_of
from preamp.kernels.joining import cat, stack
from preamp.kernels.ops import Tensors
from preamp.kernels.reference.update import Slot
from preamp.kernels.rules import Scalar, Update, norms_at

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
        check_lengths(*self._given)
        check_shapes(*self._given)
        self._update = update
        self.columns, self.odd = regular(*self._given)
        self._norms = update.norms
        if self.odd and update.norms is not None:
            kept = [place for place in range(len(params)) if place not in set(self.odd)]
            self._norms = norms_at(update.norms, kept)

    def leave_odd_to(self, op: Callable[..., None], rule: Any) -> None:
        """Let the reference's ``op`` update the places that were taken out."""
        if self.odd:
            *lists, _ = ([column[i] for i in self.odd] for column in self._given)
            op(*lists, rule=rule, update=self._update.at(self.odd))

    def given_norms(self, places: Sequence[int]) -> torch.Tensor | None:
        """``update.norms`` of tensors of the columns, if the rule has been told them."""
        norms = norms_at(self._norms, places)
        return None if norms is None else norms.to(self.dtype)

    def note_written(self) -> None:
        """Tell autograd of writes that torch's fused kernels keep from it."""
        written = [self.columns[_PARAM], *self.columns[_STATE:-1]]
        torch.autograd.graph.increment_version([t for column in written for t in column])

    def parts(self, most: int) -> Iterator[Part]:
        """Cut the columns into blocks of so many elements."""
        return parts(most, *self.columns)

    def slots(self, most: int) -> Iterator[BlockSlot]:
        """Load one block after the other."""
        for part in self.parts(most):
            for block in part.blocks:
                yield self.slot(block)

    def slot(self, block: Block) -> BlockSlot:
        """Load a block."""
        return BlockSlot(block, self.dtype, self._update)

    def each(self, part: Part, value: Scalar) -> torch.Tensor:
        """A hyper-parameter as one value for each tensor of a part."""
        device, size = self.columns[_PARAM][0].device, (len(part.places),)
        if isinstance(value, torch.Tensor):
            return value.to(device, self.dtype).expand(size)
        return torch.full(size, value, dtype=self.dtype, device=device)

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

    def __init__(self, block: Block, dtype: torch.dtype, update: Update) -> None:
        """Load; nothing is written before `store`."""
        self._block = block
        self._found_inf = update.found_inf
        self.p = block.flat(_PARAM, dtype)
        self.g = block.flat(_GRAD, dtype)
        if update.inv_scale is not None:
            self.g = self.g * self.scalar(update.inv_scale)
        states = range(_STATE, len(block.columns) - 1)
        self.state = tuple(block.flat(column, dtype) for column in states)

    def spread(self, each: torch.Tensor) -> torch.Tensor:
        """One value for each tensor of the block, as a factor of ``p``."""
        return self._block.spread(each)

    def norms(self, values: torch.Tensor, order: float = 2.0) -> torch.Tensor:
        """The norm of each of the block's tensors, of which ``values`` has the elements."""
        return stack(norms_of(self._block.split(values), order))

    def store(self, p: torch.Tensor, *state: torch.Tensor) -> None:
        """See `Slot.store`."""
        for column, values in enumerate(state, _STATE):
            self._write(column, values)
        self._write(_PARAM, p)
        self._copy_to_halves()

    def _write(self, column: int, values: torch.Tensor) -> None:
        if self._found_inf is not None:
            # As it is stored: rounding a widened nan may change its bits.
            before = self._block.flat(column, self._block.columns[column][0].dtype)
            values = torch.where(self._skips(), before, values.to(before.dtype))
        self._block.write(column, values)

    def _copy_to_halves(self) -> None:
        halves = self._block.columns[-1]
        kinds = {None if half is None else half.dtype for half in halves}
        if self._found_inf is None:
            self._block.copy_column(_PARAM, -1)
        elif len(kinds) == 1 and None not in kinds:
            self._write(len(self._block.columns) - 1, self._params(halves[0].dtype))
        else:
            for half, param in zip(halves, self._block.columns[_PARAM], strict=True):
                if half is not None:
                    half.copy_(torch.where(self._skips(), half, param.to(half.dtype)))

    def _params(self, dtype: torch.dtype) -> torch.Tensor:
        """The parameters as they are stored by now, rounded."""
        return self._block.flat(_PARAM, dtype)

    def _skips(self) -> torch.Tensor:
        flag = cast("torch.Tensor", self._found_inf)
        return flag.to(self.p.device) != 0


def norms_over(
    part: Part, of_block: Callable[[Block], tuple[torch.Tensor, ...]], order: float = 2.0
) -> list[torch.Tensor]:
    """Norms of each tensor of a part, from those of its blocks."""
    found = [of_block(block) for block in part.blocks]
    if len(found) == 1:
        return list(found[0])
    # Several blocks are those of one tensor.
    totals = [norms_of([cat(pieces)], order) for pieces in zip(*found, strict=True)]
    return [total.view(1) for (total,) in totals]
