# SPDX-License-Identifier: BSD-3-Clause
"""Ops that are one linear combination: scaling, widening, casting, ``axpby_``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.ops import Ops, Tensors
from preamp.kernels.places import Group, Row, pick, sort
from preamp.kernels.triton.device.elementwise import combine_kernel
from preamp.kernels.triton.device.jit import KINDS
from preamp.kernels.triton.launch import REFERENCE, check_devices, launch, moved, scalar
from preamp.kernels.triton.tables import CHUNK, table


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
        combine_kernel,
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


class Elementwise(Ops):
    """Scaling, adding and casting."""

    @torch.no_grad()
    def axpby_(
        self,
        targets: Tensors,
        a: torch.Tensor | float,
        xs: Tensors,
        b: torch.Tensor | float,
        ys: Row,
    ) -> None:
        check_devices(targets)
        groups, others = sort(targets, xs, ys)
        for group in groups:
            _run(group, a, b)
        if others:
            REFERENCE.axpby_(pick(targets, others), a, pick(xs, others), b, pick(ys, others))

    @torch.no_grad()
    def scale_add_(self, grads: Tensors, factor: torch.Tensor | float, addends: Row) -> None:
        check_devices(grads)
        groups, others = sort(grads, grads, addends)
        for group in groups:
            _run(group, factor, 1.0)
        if others:
            REFERENCE.scale_add_(pick(grads, others), factor, pick(addends, others))

    @torch.no_grad()
    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        check_devices(targets)
        groups, others = sort(targets, sources, [None] * len(targets))
        for group in groups:
            _run(group, 1.0, 0.0)
        if others:
            REFERENCE.cast_copy_(pick(sources, others), pick(targets, others))

    @torch.no_grad()
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Row
    ) -> list[torch.Tensor]:
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
            made = REFERENCE.widen_add(*rest)
            for position, result in zip(others, made, strict=True):
                results[position] = result
        return results
