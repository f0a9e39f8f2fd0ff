# SPDX-License-Identifier: BSD-3-Clause
"""Largest magnitudes and norms, per tensor, in two launches: per chunk, then per tensor.

Each sum is taken in a fixed order, so equal inputs give equal bits. Magnitudes are compared as
the integers that hold their bits: these grow with the value, infinity is above every number and
nan above infinity, so a maximum cannot lose either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import triton.language as tl

from preamp.core.dtypes import math_dtype
from preamp.kernels import reference
from preamp.kernels.ops import Census, Tensors
from preamp.kernels.triton.launch import KINDS, check_devices, given, kernel, launch, moved
from preamp.kernels.triton.places import Group, pick, sort
from preamp.kernels.triton.tables import CHUNK, Table, table
from preamp.kernels.triton.walk import (
    BLOCK,
    address,
    bounds,
    factor_or_one,
    find_chunk,
    load,
    magnitude_bits,
    root,
    value_of_bits,
    whole_blocks,
)


@kernel
def _measure_chunks(
    pointers,
    layout,
    n: tl.int64,
    partials,
    factor_at,
    X: tl.constexpr,
    MATH: tl.constexpr,
    ROW: tl.constexpr,
    FACTOR_AT: tl.constexpr,
    MAX: tl.constexpr,
    SUM: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Write the largest magnitude and the sum of squares of each chunk."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    at = address(pointers, n, ROW, tensor)
    factor = factor_or_one(factor_at, FACTOR_AT, MATH)
    whole = whole_blocks(at, count)
    squares = tl.zeros([BLOCK], MATH)
    largest = magnitude_bits(squares, MATH)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            x = load(at, start, where, where < count, EDGE, X, MATH) * factor
            if MAX:
                largest = tl.maximum(largest, magnitude_bits(x, MATH))
            if SUM:
                squares += x * x
            first += BLOCK
    chunk = tl.program_id(0).to(tl.int64)
    if MAX:
        tl.store(partials + chunk, value_of_bits(tl.max(largest, 0), MATH))
    if SUM:
        if MAX:
            partials += tl.num_programs(0)
        tl.store(partials + chunk, tl.sum(squares, 0))


@kernel
def _gather(
    pointers,
    layout,
    n: tl.int64,
    partials,
    results,
    found_inf,
    MATH: tl.constexpr,
    MAX: tl.constexpr,
    FOUND_INF: tl.constexpr,
):
    """Bring the partial results of one tensor together, at its position in ``results``."""
    tensor = tl.program_id(0).to(tl.int64)
    first = tl.load(layout + n + tensor)
    last = tl.load(layout + n + tensor + 1)
    squares = tl.zeros([BLOCK], MATH)
    largest = magnitude_bits(squares, MATH)
    while first < last:
        chunks = first + tl.arange(0, BLOCK)
        values = tl.load(partials + chunks, mask=chunks < last, other=0)
        if MAX:
            largest = tl.maximum(largest, magnitude_bits(values, MATH))
        else:
            squares += values
        first += BLOCK
    if MAX:
        result = value_of_bits(tl.max(largest, 0), MATH)
    else:
        result = root(tl.sum(squares, 0), MATH)
    position = tl.load(layout + 2 * n + 1 + tensor)
    tl.store(results + position, result)
    if FOUND_INF:
        if (result - result) != 0:  # nan for infinity and nan
            tl.store(found_inf, 1.0)  # whoever writes, writes the same


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
        _gather,
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
        _measure_chunks,
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
        verdict, largest, norms = found[group.device].split([1, count, count])
        entries = table(group.rows, group.positions)
        partials = measure(entries, 0, _dtypes(group), largest=True, squares=with_norms)
        gather(entries, partials[0], largest, largest=True, found_inf=verdict)
        if with_norms:
            gather(entries, partials[1], norms, largest=False)
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
    norms = [*l2norms(tensors, None, device)]
    pairs = zip(norms, factors, strict=True)
    scaled_norms = [norm if by is None else norm * moved(by, device) for norm, by in pairs]
    if not scaled_norms:
        return torch.zeros((), device=device)
    return cast("Any", torch).linalg.vector_norm(torch.stack(scaled_norms), 2)


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
