# SPDX-License-Identifier: BSD-3-Clause
"""Census and norms: what is read and not written."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.tensors import dtype_of
from preamp.kernels.blocks.cut import (
    REFERENCE,
    Cut,
    InBlocks,
    Plan,
    copy_,
    geometry_of,
    regular,
    split,
)
from preamp.kernels.blocks.norms import norms_of
from preamp.kernels.joining import stack
from preamp.kernels.ops import Census, Tensors
from preamp.kernels.reference.update import norm

_torch: Any = torch
_CPU = torch.device("cpu")
_SMALL = 1 << 16
"""Elements up to which joining tensors costs less than calls of their own."""


class Reductions(InBlocks):
    """Census and norms.

    On a CPU small tensors are joined and read as one; on other devices torch has kernels that
    read many tensors at once.
    """

    @torch.no_grad()
    def census(
        self,
        grads: Tensors,
        device: torch.device,
        *,
        with_norm: bool = False,
        with_max_abs: bool = True,
    ) -> Census:
        """See `preamp.kernels.ops.Ops.census`.

        On a CPU it is looked for which tensors an overflow is in only where there is one.
        """
        if not self._are_near(grads):
            return self._census_of_far(grads, device, with_norm=with_norm)
        norm = self.l2norm(grads, [None] * len(grads), _CPU) if with_norm else None
        if norm is not None and math.isfinite(norm.item()):
            found_inf = torch.zeros((), dtype=torch.float32, device=_CPU)  # no need to look further
        else:
            column, odd = _regular(grads)
            found_inf = self._found_inf(column)
            if odd:
                rest = REFERENCE.census([grads[i] for i in odd], _CPU)
                found_inf = torch.maximum(found_inf, rest.found_inf)
        max_abs = None
        if with_max_abs or found_inf.item() != 0:
            max_abs = REFERENCE.census(grads, device).max_abs
        return Census(found_inf.to(device), None if norm is None else norm.to(device), max_abs)

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        """See `preamp.kernels.ops.Ops.l2norms`."""
        if self._are_near(tensors):
            return self._norms_of_each(tensors, factor).to(device)
        places, others = _sort(tensors)
        norms = torch.zeros(len(tensors), dtype=torch.float32, device=device)
        for dtype, own in places.items():
            values, wide = [tensors[place] for place in own], math_dtype(dtype)
            if factor is not None:
                by = factor.to(values[0].device)
                values = _torch._foreach_mul([value.to(wide) for value in values], by)
            _put(norms, own, norms_of(values, dtype=wide))
        if others:
            rest = REFERENCE.l2norms([tensors[place] for place in others], factor, device)
            _put(norms, others, rest.unbind())
        return norms

    @torch.no_grad()
    def l2norm(
        self,
        tensors: Tensors,
        factors: Sequence[torch.Tensor | None],
        device: torch.device,
    ) -> torch.Tensor:
        """See `preamp.kernels.ops.Ops.l2norm`."""
        if not self._are_near(tensors):
            norms = self.l2norms(tensors, None, device)
            if any(factor is not None for factor in factors):
                one = torch.ones((), dtype=torch.float32, device=device)
                norms = norms * stack([one if by is None else by.to(device) for by in factors])
            return norm(norms)
        totals: list[torch.Tensor] = []
        for factor, own in _by_factor(tensors, factors):
            column, odd = _regular(own)
            found = self._norms_in_order(column)
            found += [REFERENCE.l2norms([own[i] for i in odd], None, _CPU)] if odd else []
            total = _total(found)
            totals.append(total if factor is None else total * factor.to(_CPU))
        return _total(totals).to(device)

    def _are_near(self, tensors: Tensors) -> bool:
        return self._is_near(tensors[0]) if tensors else self._reads

    # -- on a CPU ------------------------------------------------------------------------------

    def _joined(self, column: Tensors) -> Iterator[torch.Tensor]:
        """The tensors by dtype, small ones joined, each valid until the next; no empty ones."""
        geometry = geometry_of(column)
        if geometry is None:  # there are none
            return
        plans = _reading_plans(geometry.shapes, geometry.leaders, self._large(near=True))
        for dtype, plan in plans:
            with plan.workspaces(dtype) as (space,):
                for cut in plan.cuts:
                    tensors = cut.of(column)
                    if len(tensors) == 1:
                        yield tensors[0].view(-1)
                    else:
                        copy_(space.views(cut.index), tensors)
                        yield space.memory[: cut.numel]

    def _found_inf(self, column: Tensors) -> torch.Tensor:
        """1.0 if there is an infinite value or nan; nan is both the smallest and the largest."""
        ends = [end for tensor in self._joined(column) for end in torch.aminmax(tensor)]
        return (~torch.isfinite(_stack(ends)).all()).float()

    def _norms_in_order(self, column: Tensors) -> list[torch.Tensor]:
        """Norms that together are the norm of all."""
        return [found for tensor in self._joined(column) for found in self._pieces(tensor)]

    def _pieces(
        self, tensor: torch.Tensor, factor: torch.Tensor | None = None
    ) -> Iterator[torch.Tensor]:
        """Norms of a tensor or of pieces of it, multiplied by ``factor`` before."""
        dtype = math_dtype(tensor.dtype)
        if factor is None and dtype is tensor.dtype:
            yield norm(tensor)
            return
        # torch would widen a half tensor as a whole, into memory that it asks for each time.
        most = self._large(near=True)
        wide = torch.empty(min(most, tensor.numel()), dtype=dtype, device=_CPU)
        for piece in split(tensor, most):
            values = wide[: piece.numel()].copy_(piece)
            yield norm(values if factor is None else values.mul_(factor))

    def _norms_of_each(self, tensors: Tensors, factor: torch.Tensor | None) -> torch.Tensor:
        factor = None if factor is None else factor.to(_CPU)
        column, odd = _regular(tensors)
        kinds = set(map(dtype_of, column))
        if factor is None and len(kinds) == 1 and kinds <= {torch.float32, torch.float64}:
            norms = stack(norms_of(column)).float()
        else:
            norms = _stack([_total(list(self._pieces(tensor, factor))) for tensor in column])
        if odd:
            more = REFERENCE.l2norms([tensors[i] for i in odd], factor, _CPU)
            norms, kept = norms.new_empty(len(tensors)), norms
            is_odd = torch.zeros(len(tensors), dtype=torch.bool, device=_CPU)
            is_odd[odd] = True
            norms[is_odd], norms[~is_odd] = more, kept
        return norms

    # -- on other devices ----------------------------------------------------------------------

    def _census_of_far(self, grads: Tensors, device: torch.device, *, with_norm: bool) -> Census:
        """The largest magnitudes are how an overflow is found."""
        places, others = _sort(grads)
        has_float64 = any(grad.dtype is torch.float64 for grad in grads)
        wide = torch.float64 if has_float64 else torch.float32
        max_abs = torch.zeros(len(grads), dtype=wide, device=device)
        for dtype, own in places.items():
            values = [grads[place] for place in own]
            _put(max_abs, own, _torch._foreach_norm(values, math.inf, math_dtype(dtype)))
        found_inf = 1.0 - torch.isfinite(max_abs).all().float()
        if others:
            rest = REFERENCE.census([grads[place] for place in others], device)
            found_inf = torch.maximum(found_inf, rest.found_inf)
            if rest.max_abs is not None:
                _put(max_abs, others, rest.max_abs.unbind())
        total = self.l2norm(grads, [None] * len(grads), device) if with_norm else None
        return Census(found_inf=found_inf, norm=total, max_abs=max_abs.float())


@functools.lru_cache(maxsize=32)
def _reading_plans(
    shapes: tuple[torch.Size, ...], kinds: tuple[torch.dtype, ...], large: int
) -> list[tuple[torch.dtype, Plan]]:
    """Plans by dtype; ``kinds`` has the dtype of each tensor, or one for all."""
    cuts: dict[torch.dtype, list[Cut]] = {}
    together: dict[torch.dtype, list[int]] = {}
    room: dict[torch.dtype, int] = {}

    def close(dtype: torch.dtype) -> None:
        own = tuple(together[dtype])
        numel = sum(shapes[place].numel() for place in own)
        before = cuts.setdefault(dtype, [])
        before.append(Cut(own, numel, sum(cut.index >= 0 for cut in before)))

    for place, (shape, dtype) in enumerate(zip(shapes, itertools.cycle(kinds), strict=False)):
        size = shape.numel()
        if size > _SMALL:
            cuts.setdefault(dtype, []).append(Cut((place,), size, -1))
        elif size:
            if size > room.get(dtype, 0):
                if dtype in together:
                    close(dtype)
                together[dtype], room[dtype] = [], large
            together[dtype].append(place)
            room[dtype] -= size
    for dtype in together:
        close(dtype)
    # Large tensors are read where they are, so no workspace needs room for pieces of them.
    return [(dtype, Plan(shapes, own, 0)) for dtype, own in cuts.items()]


def _regular(tensors: Tensors) -> tuple[Tensors, list[int]]:
    """See `regular`."""
    if geometry_of(tensors) is not None:
        return tensors, []
    (column,), odd = regular(tensors)
    return column, odd


def _by_factor(
    tensors: Tensors, factors: Sequence[torch.Tensor | None]
) -> list[tuple[torch.Tensor | None, Tensors]]:
    """The tensors of each factor."""
    if tensors and all(map(operator.is_, factors, itertools.repeat(factors[0]))):
        return [(factors[0], tensors)]
    sorted_: dict[int, tuple[torch.Tensor | None, list[torch.Tensor]]] = {}
    for tensor, factor in zip(tensors, factors, strict=True):
        sorted_.setdefault(id(factor), (factor, []))[1].append(tensor)
    return list(sorted_.values())


def _sort(tensors: Tensors) -> tuple[dict[torch.dtype, list[int]], list[int]]:
    """Where the tensors of each dtype stand, and those of other kinds; empty ones are left out."""
    places: dict[torch.dtype, list[int]] = {}
    others: list[int] = []
    for place, tensor in enumerate(tensors):
        if tensor.layout is not torch.strided or tensor.is_complex():
            others.append(place)
        elif tensor.numel():
            places.setdefault(tensor.dtype, []).append(place)
    return places, others


def _put(target: torch.Tensor, places: list[int], values: Sequence[torch.Tensor]) -> None:
    """Write scalars to ``places``; an index would have to be copied to the device."""
    copy_([target[place] for place in places], values)


def _stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One vector of scalars of any float dtype, on the CPU."""
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1:  # finite float64 values may lie beyond float32's range
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        values = [value.to(wide) for value in values]
    return stack(list(values)) if values else torch.zeros(0, dtype=torch.float32, device=_CPU)


def _total(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    values = _stack([value for norm in norms for value in norm.reshape(-1).unbind()])
    return norm(values).float()
