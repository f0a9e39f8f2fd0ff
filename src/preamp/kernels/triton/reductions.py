# SPDX-License-Identifier: BSD-3-Clause
"""Largest magnitudes and norms, per tensor, in two launches: per chunk, then per tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from preamp.kernels.ops import Census, Ops, Tensors
from preamp.kernels.plans import pick
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.device.reductions import gather_kernel, measure_chunks
from preamp.kernels.triton.launch import PLAIN, given, launch, planned_here, width_of
from preamp.kernels.triton.tables import CHUNK, Table, table

_vector_norm: Callable[..., torch.Tensor] = cast("Any", torch).linalg.vector_norm


def gather(
    entries: Table,
    partials: torch.Tensor,
    results: torch.Tensor,
    *,
    largest: bool,
    found_inf: torch.Tensor | None = None,
) -> None:
    """Write the norm, or the ``largest`` magnitude, of each tensor to its place in ``results``.

    ``found_inf`` becomes 1 if one of them is not finite, and is left alone otherwise.
    """
    launch(
        gather_kernel,
        (entries.count,),
        entries,
        partials=partials,
        results=results,
        found_inf=results if found_inf is None else found_inf,
        MAX=largest,
        FOUND_INF=found_inf is not None,
    )


def measure(
    entries: Table,
    column: tuple[int, torch.dtype | None],
    *,
    beside: tuple[int, torch.dtype | None] = (0, None),
    largest: bool,
    squares: bool,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return per chunk of one list what is asked for, a row of each in this order.

    ``column`` are the list's row and dtype; ``factor`` multiplies every value before anything else.
    ``beside`` are row and dtype of what else says the values: half weights, or the low bits of
    split ones.
    """
    shape = (largest + squares, entries.chunks)
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
    def census(self, grads: Tensors, device: torch.device, *, with_norm: bool = False) -> Census:
        plans, others = planned_here(grads)
        count = len(grads)
        found: dict[torch.device, torch.Tensor] = {}
        for plan in plans:
            if plan.device not in found:
                found[plan.device] = torch.zeros(
                    1 + 2 * count, dtype=torch.float32, device=plan.device
                )
            results = found[plan.device]
            entries = table(plan)
            partials = measure(entries, (0, plan.dtypes[0]), largest=True, squares=with_norm)
            gather(entries, partials[0], results[1:], largest=True, found_inf=results)
            if with_norm:
                gather(entries, partials[1], results[1 + count :], largest=False)
        total = _merge(found, 1 + 2 * count, device)
        if others:
            own = pick(grads, others)
            part = PLAIN.census(own, device)
            total[0] = torch.maximum(total[0], part.found_inf)
            _put(total[1:], others, part.max_abs)
            if with_norm:
                _put(total[1 + count :], others, PLAIN.l2norms(own, None, device))
        norm = _vector_norm(total[1 + count :], 2) if with_norm else None
        return Census(found_inf=total[0], norm=norm, max_abs=total[1 : 1 + count])

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
