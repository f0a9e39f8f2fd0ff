# SPDX-License-Identifier: BSD-3-Clause
"""Largest magnitudes and norms, per tensor, in two launches: per chunk, then per tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import repeat
from operator import is_
from typing import Any, cast

import torch

from preamp.kernels.ops import Census, Column, Ops, Tensors
from preamp.kernels.plans import pick
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.device.reductions import gather_kernel, measure_chunks
from preamp.kernels.triton.launch import PLAIN, given, launch, moved, planned_here, width_of
from preamp.kernels.triton.tables import CHUNK, Table, table
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
        MAX=largest,
        FOUND_INF=found_inf is not None,
        FINITE=finite is not None,
    )


def gathered(entries: Table, partials: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """Return what `gather` writes, as float32."""
    results = partials.new_empty(entries.count)
    gather(entries, partials, results, largest=largest)
    return results


def measure(
    entries: Table,
    column: tuple[int, torch.dtype | None],
    *,
    beside: tuple[int, torch.dtype | None] = (0, None),
    largest: bool,
    squares: bool,
    finite: bool = False,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return per chunk of one list what is asked for, a row of each in this order.

    ``column`` are the list's row and dtype; ``factor`` multiplies every value before anything else.
    ``beside`` are row and dtype of what else says the values: half weights, or the low bits of
    split ones.
    """
    shape = (largest + squares + finite, entries.chunks)
    partials = torch.empty(shape, dtype=torch.float32, device=entries.layout.device)
    launch(
        measure_chunks,
        (entries.chunks,),
        entries,
        partials=partials,
        **given("factor", factor, entries),
        X=KINDS[column[1]],
        ROW=column[0],
        H=KINDS[beside[1]],
        H_ROW=beside[0],
        MAX=largest,
        SUM=squares,
        FINITE=finite,
        CHUNK=CHUNK,
        WIDTH=width_of(),
    )
    return partials


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
        plans, others = planned_here(grads)
        count = len(grads)
        found: dict[torch.device, torch.Tensor] = {}
        for plan in plans:
            if plan.device not in found:
                found[plan.device] = torch.zeros(
                    1 + 3 * count, dtype=torch.float32, device=plan.device
                )
            results = found[plan.device]
            entries = table(plan)
            partials = measure(
                entries, (0, plan.dtypes[0]), largest=True, squares=with_norm, finite=True
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
            part = PLAIN.census(own, device)
            total[0] = torch.maximum(total[0], part.found_inf)
            _put(total[1:], others, part.max_abs)
            unknown = torch.full((len(others),), torch.nan, dtype=torch.float32, device=device)
            _put(total[1 + count :], others, unknown)
            if with_norm:
                _put(total[1 + 2 * count :], others, PLAIN.l2norms(own, None, device))
        norm = _vector_norm(total[1 + 2 * count :], 2) if with_norm else None
        largest = total[1 : 1 + 2 * count]
        return Census(
            found_inf=total[0], norm=norm, max_abs=largest[:count], max_finite=largest[count:]
        )

    @torch.no_grad()
    def l2norms(
        self, tensors: Tensors, factor: torch.Tensor | None, device: torch.device
    ) -> torch.Tensor:
        plans, others = planned_here(tensors)
        found: dict[torch.device, torch.Tensor] = {}
        for plan in plans:
            if plan.device not in found:
                found[plan.device] = torch.zeros(
                    len(tensors), dtype=torch.float32, device=plan.device
                )
            entries = table(plan)
            partials = measure(
                entries, (0, plan.dtypes[0]), largest=False, squares=True, factor=factor
            )
            gather(entries, partials, found[plan.device], largest=False)
        total = _merge(found, len(tensors), device)
        if others:
            _put(total, others, PLAIN.l2norms(pick(tensors, others), factor, device))
        return total

    tally: Any = PLAIN.tally

    @torch.no_grad()
    def l2norm(self, tensors: Tensors, factors: Column, device: torch.device) -> torch.Tensor:
        norms = self.l2norms(tensors, None, device)
        if not factors:
            return _vector_norm(norms, 2)
        if all(map(is_, factors, repeat(factors[0]))):  # as a rule: one backward, one factor
            return _vector_norm(norms * _number(factors[0], device), 2)
        distinct = dict(zip(map(id, factors), factors, strict=True))
        numbers = {key: _number(by, device) for key, by in distinct.items()}
        return _vector_norm(norms * stack([numbers[id(factor)] for factor in factors]), 2)


def _number(factor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if factor is None:
        return torch.ones((), dtype=torch.float32, device=device)
    return moved(factor, device).float()
