# SPDX-License-Identifier: BSD-3-Clause
"""Largest magnitudes and norms, per tensor, in two launches: per chunk, then per tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.ops import Census, Column, Ops, Tensors
from preamp.kernels.places import Group, pick, sort
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.device.reductions import gather_kernel, measure_chunks
from preamp.kernels.triton.launch import REFERENCE, check_devices, given, launch, moved, width_of
from preamp.kernels.triton.tables import CHUNK, Table, sizes_of, table
from preamp.kernels.vectors import stack

_vector_norm: Callable[..., torch.Tensor] = cast("Any", torch).linalg.vector_norm


def gather(
    entries: Table,
    partials: torch.Tensor,
    results: torch.Tensor,
    *,
    largest: bool,
    found_inf: torch.Tensor | None = None,
    finite: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Write the norm, or the ``largest`` magnitude, of each tensor to its place in ``results``.

    ``found_inf`` becomes 1 if one of them is not finite, and is left alone otherwise. ``finite``
    are further partial results, of the largest finite magnitudes, and where those go.
    """
    launch(
        gather_kernel,
        (entries.count,),
        entries,
        partials=partials,
        results=results,
        found_inf=results if found_inf is None else found_inf,
        finite_partials=partials if finite is None else finite[0],
        finite_results=results if finite is None else finite[1],
        MATH=KINDS[partials.dtype],
        MAX=largest,
        FOUND_INF=found_inf is not None,
        FINITE=finite is not None,
    )


def gathered(entries: Table, partials: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """Return what `gather` writes, in the dtype of the computation."""
    results = partials.new_empty(entries.count)
    gather(entries, partials, results, largest=largest)
    return results


def measure(
    entries: Table,
    row: int | tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    largest: bool,
    squares: bool,
    finite: bool = False,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return per chunk of list ``row`` what is asked for, a row of each in this order.

    ``dtypes`` are that of the list and that of the computation; ``factor`` multiplies every value
    before anything else. Split values are in two rows, the second one that of their low bits.
    """
    first, lows = row if isinstance(row, tuple) else (row, None)
    shape = (largest + squares + finite, entries.chunks)
    partials = torch.empty(shape, dtype=dtypes[1], device=entries.layout.device)
    launch(
        measure_chunks,
        (entries.chunks,),
        entries,
        partials=partials,
        **given("factor", factor, entries),
        X=KINDS[dtypes[0]],
        MATH=KINDS[dtypes[1]],
        ROW=first,
        LOWS=lows,
        MAX=largest,
        SUM=squares,
        FINITE=finite,
        CHUNK=CHUNK,
        WIDTH=width_of(),
    )
    return partials


def _dtypes(group: Group) -> tuple[torch.dtype, torch.dtype]:
    dtype = cast("torch.dtype", group.dtypes[0])
    return dtype, math_dtype(dtype)


def _merge(
    found: dict[torch.device, torch.Tensor], size: int, device: torch.device
) -> torch.Tensor:
    """One vector on ``device``: no value is negative, and each is zero on all devices but one."""
    total = found.pop(device, None)
    if total is None:
        total = torch.zeros(size, dtype=torch.float32, device=device)
    for part in found.values():
        total = torch.maximum(total, part.to(device))
    return total


def _put(total: torch.Tensor, positions: Sequence[int], values: torch.Tensor | None) -> None:
    if values is not None:
        for position, value in zip(positions, values.unbind(), strict=True):
            total[position] = value


class Reductions(Ops):
    """Census and norms."""

    @torch.no_grad()
    def census(
        self,
        grads: Tensors,
        device: torch.device,
        *,
        with_norm: bool = False,
        with_max_abs: bool = True,
    ) -> Census:
        del with_max_abs  # they cost nothing
        check_devices(grads)
        groups, others = sort(grads)
        count = len(grads)
        found: dict[torch.device, torch.Tensor] = {}
        for group in groups:
            if group.device not in found:
                found[group.device] = torch.zeros(
                    1 + 3 * count, dtype=torch.float32, device=group.device
                )
            results = found[group.device]
            entries = table(group.rows, group.positions, sizes=sizes_of(group))
            partials = measure(
                entries, 0, _dtypes(group), largest=True, squares=with_norm, finite=True
            )
            finite = (partials[-1], results[1 + count :])
            gather(
                entries, partials[0], results[1:], largest=True, found_inf=results, finite=finite
            )
            if with_norm:
                gather(entries, partials[1], results[1 + 2 * count :], largest=False)
        total = _merge(found, 1 + 3 * count, device)
        if others:
            own = pick(grads, others)
            part = REFERENCE.census(own, device)
            total[0] = torch.maximum(total[0], part.found_inf)
            _put(total[1:], others, part.max_abs)
            unknown = torch.full((len(others),), torch.nan, dtype=torch.float32, device=device)
            _put(total[1 + count :], others, unknown)
            if with_norm:
                _put(total[1 + 2 * count :], others, REFERENCE.l2norms(own, None, device))
        norm = _vector_norm(total[1 + 2 * count :], 2) if with_norm else None
        largest = total[1 : 1 + 2 * count]
        return Census(
            found_inf=total[0], norm=norm, max_abs=largest[:count], max_finite=largest[count:]
        )

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        check_devices(tensors)
        groups, others = sort(tensors)
        found: dict[torch.device, torch.Tensor] = {}
        for group in groups:
            if group.device not in found:
                found[group.device] = torch.zeros(
                    len(tensors), dtype=torch.float32, device=group.device
                )
            entries = table(group.rows, group.positions, sizes=sizes_of(group))
            partials = measure(
                entries, 0, _dtypes(group), largest=False, squares=True, factor=factor
            )
            gather(entries, partials, found[group.device], largest=False)
        total = _merge(found, len(tensors), device)
        if others:
            _put(total, others, REFERENCE.l2norms(pick(tensors, others), factor, device))
        return total

    tally: Any = REFERENCE.tally

    @torch.no_grad()
    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        norms = self.l2norms(tensors, None, device)
        distinct = dict(zip(map(id, factors), factors, strict=True))
        numbers = {
            key: torch.ones((), dtype=torch.float32, device=device)
            if by is None
            else moved(by, device).float()
            for key, by in distinct.items()
        }
        if len(numbers) == 1:  # as a rule: one backward, one factor
            norms = norms * next(iter(numbers.values()))
        elif numbers:
            norms = norms * stack([numbers[id(factor)] for factor in factors])
        return _vector_norm(norms, 2)
