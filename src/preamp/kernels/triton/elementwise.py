# SPDX-License-Identifier: BSD-3-Clause
"""Ops that are one linear combination: scaling, widening, casting, ``axpby_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import triton.language as tl

from preamp.core.dtypes import math_dtype
from preamp.kernels import reference
from preamp.kernels.ops import Tensors
from preamp.kernels.triton.launch import KINDS, check_devices, kernel, launch, moved, scalar
from preamp.kernels.triton.places import Group, Row, pick, sort
from preamp.kernels.triton.tables import CHUNK, table
from preamp.kernels.triton.walk import (
    BLOCK,
    address,
    bounds,
    find_chunk,
    load,
    load_one,
    narrow,
    store,
    whole_blocks,
)
from preamp.kernels.triton.walk import (
    scalar as read_scalar,
)


@kernel
def _combine(
    pointers,
    layout,
    n: tl.int64,
    a: tl.int64,
    a_at,
    b: tl.int64,
    b_at,
    T: tl.constexpr,
    X: tl.constexpr,
    Y: tl.constexpr,
    X_MATH: tl.constexpr,
    Y_MATH: tl.constexpr,
    A_AT: tl.constexpr,
    B_AT: tl.constexpr,
    A_EACH: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """``target = a * x + b * y``; rows: targets, xs, ys if any, factors if ``A_EACH``."""
    tensor, start, count = find_chunk(layout, n, CHUNK)
    target_at = address(pointers, n, 0, tensor)
    x_at = address(pointers, n, 1, tensor)
    y_at = x_at
    if Y is not None:
        y_at = address(pointers, n, 2, tensor)
    if A_EACH:
        factor = load_one(address(pointers, n, A_EACH, tensor), tl.float32, X_MATH)
    else:
        factor = read_scalar(a, a_at, A_AT, X_MATH)
    whole = whole_blocks(target_at | x_at | y_at, count)
    for EDGE in tl.static_range(2):
        first, end = bounds(whole, count, EDGE)
        while first < end:
            where = first + tl.arange(0, BLOCK)
            mask = where < count
            result = load(x_at, start, where, mask, EDGE, X, X_MATH) * factor
            if Y is not None:
                y = load(y_at, start, where, mask, EDGE, Y, Y_MATH)
                result = result + y * read_scalar(b, b_at, B_AT, Y_MATH)
            store(target_at, start, where, mask, EDGE, T, narrow(result, T))
            first += BLOCK


def _run(
    group: Group,
    a: torch.Tensor | float,
    b: torch.Tensor | float,
    factors: Sequence[torch.Tensor] = (),
) -> None:
    rows = [row for row in group.rows if row]
    if factors:
        rows.append([moved(factors[i].float(), group.device) for i in group.positions])
    target, x, y = group.dtypes
    x_math = math_dtype(cast("torch.dtype", x))
    y_math = math_dtype(y or torch.float32)
    entries = table(rows, group.positions)
    launch(
        _combine,
        (entries.chunks,),
        entries,
        **scalar("a", a, entries, x_math),
        **scalar("b", b, entries, y_math),
        T=KINDS[target],
        X=KINDS[x],
        Y=KINDS[y],
        X_MATH=KINDS[x_math],
        Y_MATH=KINDS[y_math],
        A_EACH=len(rows) - 1 if factors else 0,
        CHUNK=CHUNK,
    )
    torch.autograd.graph.increment_version(group.rows[0])


@torch.no_grad()
def axpby_(
    targets: Tensors,
    a: torch.Tensor | float,
    xs: Tensors,
    b: torch.Tensor | float,
    ys: Row,
) -> None:
    """See `preamp.kernels.ops.Ops.axpby_`."""
    check_devices(targets)
    groups, others = sort(targets, xs, ys)
    for group in groups:
        _run(group, a, b)
    if others:
        reference.axpby_(pick(targets, others), a, pick(xs, others), b, pick(ys, others))


@torch.no_grad()
def scale_add_(grads: Tensors, factor: torch.Tensor | float, addends: Row) -> None:
    """See `preamp.kernels.ops.Ops.scale_add_`."""
    check_devices(grads)
    groups, others = sort(grads, grads, addends)
    for group in groups:
        _run(group, factor, 1.0)
    if others:
        reference.scale_add_(pick(grads, others), factor, pick(addends, others))


@torch.no_grad()
def cast_copy_(sources: Tensors, targets: Tensors) -> None:
    """See `preamp.kernels.ops.Ops.cast_copy_`."""
    check_devices(targets)
    groups, others = sort(targets, sources, [None] * len(targets))
    for group in groups:
        _run(group, 1.0, 0.0)
    if others:
        reference.cast_copy_(pick(sources, others), pick(targets, others))


@torch.no_grad()
def widen_add(halves: Tensors, factors: Sequence[torch.Tensor], addends: Row) -> list[torch.Tensor]:
    """See `preamp.kernels.ops.Ops.widen_add`."""
    check_devices(halves)
    results = [
        torch.empty_like(half, dtype=torch.float32) if addend is None else addend
        for half, addend in zip(halves, addends, strict=True)
    ]
    groups, others = sort(results, halves, addends)
    for group in groups:
        _run(group, 1.0, 1.0, factors)
    if others:
        rest = (pick(halves, others), pick(factors, others), pick(addends, others))
        made = reference.widen_add(*rest)
        for position, result in zip(others, made, strict=True):
            results[position] = result
    return results
