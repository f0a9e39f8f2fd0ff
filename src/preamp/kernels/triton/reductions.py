# SPDX-License-Identifier: BSD-3-Clause
"""Largest magnitudes and norms, per tensor, in two launches: per chunk, then per tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels import reference
from preamp.kernels.ops import Census, Tensors
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.device.reductions import gather_kernel, measure_chunks
from preamp.kernels.triton.launch import check_devices, given, launch, moved
from preamp.kernels.triton.places import Group, pick, sort
from preamp.kernels.triton.tables import CHUNK, Table, table


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
        MATH=KINDS[partials.dtype],
        MAX=largest,
        FOUND_INF=found_inf is not None,
    )


def gathered(entries: Table, partials: torch.Tensor, *, largest: bool) -> torch.Tensor:
    """Return what `gather` writes, in the dtype of the computation."""
    results = partials.new_empty(entries.count)
    gather(entries, partials, results, largest=largest)
    return results


def measure(
    entries: Table,
    row: int,
    dtypes: tuple[torch.dtype, torch.dtype],
    *,
    largest: bool,
    squares: bool,
    factor: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return per chunk the ``largest`` magnitude, the sum of ``squares``, or a row of each.

    Args:
        entries: The table.
        row: Which of its lists to read.
        dtypes: That of the list, and that of the computation.
        largest: Take the largest magnitude.
        squares: Take the sum of squares.
        factor: Multiplies every value before anything else.
    """
    shape = (largest + squares, entries.chunks)
    partials = torch.empty(shape, dtype=dtypes[1], device=entries.layout.device)
    launch(
        measure_chunks,
        (entries.chunks,),
        entries,
        partials=partials,
        **given("factor", factor, entries),
        X=KINDS[dtypes[0]],
        MATH=KINDS[dtypes[1]],
        ROW=row,
        MAX=largest,
        SUM=squares,
        CHUNK=CHUNK,
    )
    return partials


@torch.no_grad()
def census(grads: Tensors, device: torch.device, *, with_norms: bool = False) -> Census:
    """See `preamp.kernels.ops.Ops.census`."""
    check_devices(grads)
    groups, others = sort(grads)
    count = len(grads)
    found: dict[torch.device, torch.Tensor] = {}
    for group in groups:
        if group.device not in found:
            found[group.device] = torch.zeros(1 + 2 * count, device=group.device)
        results = found[group.device]
        entries = table(group.rows, group.positions)
        partials = measure(entries, 0, _dtypes(group), largest=True, squares=with_norms)
        gather(entries, partials[0], results[1:], largest=True, found_inf=results)
        if with_norms:
            gather(entries, partials[1], results[1 + count :], largest=False)
    total = _merge(found, 1 + 2 * count, device)
    if others:
        part = reference.census(pick(grads, others), device, with_norms=with_norms)
        total[0] = torch.maximum(total[0], part.found_inf)
        for row, values in enumerate((part.max_abs, part.norms)):
            _put(total[1 + row * count :], others, values)
    norms = total[1 + count :] if with_norms else None
    return Census(found_inf=total[0], max_abs=total[1 : 1 + count], norms=norms)


@torch.no_grad()
def l2norms(tensors: Tensors, factor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.l2norms`."""
    check_devices(tensors)
    groups, others = sort(tensors)
    found: dict[torch.device, torch.Tensor] = {}
    for group in groups:
        if group.device not in found:
            found[group.device] = torch.zeros(len(tensors), device=group.device)
        entries = table(group.rows, group.positions)
        partials = measure(entries, 0, _dtypes(group), largest=False, squares=True, factor=factor)
        gather(entries, partials, found[group.device], largest=False)
    total = _merge(found, len(tensors), device)
    if others:
        _put(total, others, reference.l2norms(pick(tensors, others), factor, device))
    return total


@torch.no_grad()
def l2norm(
    tensors: Tensors, factors: Sequence[torch.Tensor | None], device: torch.device
) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.l2norm`."""
    norms = l2norms(tensors, None, device)
    if any([factor is not None for factor in factors]):
        one = torch.ones((), device=device)
        moves = (one if by is None else moved(by, device).float() for by in factors)
        norms = norms * torch.stack([*moves])
    return cast("Any", torch).linalg.vector_norm(norms, 2)


def _dtypes(group: Group) -> tuple[torch.dtype, torch.dtype]:
    dtype = cast("torch.dtype", group.dtypes[0])
    return dtype, math_dtype(dtype)


def _merge(
    found: dict[torch.device, torch.Tensor], size: int, device: torch.device
) -> torch.Tensor:
    """One vector on ``device``: no value is negative, and each is zero on all devices but one."""
    total = found.pop(device, None)
    if total is None:
        total = torch.zeros(size, device=device)
    for part in found.values():
        total = torch.maximum(total, part.to(device))
    return total


def _put(total: torch.Tensor, positions: Sequence[int], values: torch.Tensor | None) -> None:
    if values is not None:
        for position, value in zip(positions, values.unbind(), strict=True):
            total[position] = value
