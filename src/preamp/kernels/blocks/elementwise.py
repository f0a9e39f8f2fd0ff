# SPDX-License-Identifier: BSD-3-Clause
"""Scaling, adding and casting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels.blocks.cut import (
    REFERENCE,
    Block,
    Column,
    InBlocks,
    blocks_of,
    by_dtype,
    check_lengths,
    copy_,
    plan_of,
    regular,
    shapes_of,
)
from preamp.kernels.ops import Tensors

_torch: Any = torch
Factor = torch.Tensor | float


class Elementwise(InBlocks):
    """Ops without sums."""

    @torch.no_grad()
    def scale_add_(self, grads: Tensors, factor: Factor, addends: Column) -> None:
        """See `preamp.kernels.ops.Ops.scale_add_`."""
        check_lengths(grads, addends)
        columns, odd = regular(grads, addends)
        if odd:
            REFERENCE.scale_add_([grads[i] for i in odd], factor, [addends[i] for i in odd])
        for targets, others in by_dtype(*columns):
            dtype = math_dtype(targets[0].dtype)
            by = _beside(factor, targets[0], dtype)
            if targets[0].dtype is dtype and others[0] is None:
                self._multiply_(targets, by)
                continue
            for block in self._blocks(dtype, targets, others):
                wide = block.flat(0, dtype) * by
                if others[0] is not None:
                    wide += block.flat(1, dtype)
                block.write(0, wide)

    @torch.no_grad()
    def widen_add(
        self, halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
    ) -> list[torch.Tensor]:
        """See `preamp.kernels.ops.Ops.widen_add`."""
        check_lengths(halves, factors, addends)
        if any(half.layout is not torch.strided for half in halves):
            return REFERENCE.widen_add(halves, factors, addends)
        kept = torch.preserve_format
        wide = [torch.empty_like(h, dtype=torch.float32, memory_format=kept) for h in halves]
        if not wide:
            return []
        copy_(wide, halves)
        if len(set(map(id, factors))) == 1:
            self._multiply_(wide, factors[0].to(wide[0].device))
        else:
            by = [factor.to(w.device) for factor, w in zip(factors, wide, strict=True)]
            _torch._foreach_mul_(wide, by)
        pairs = [(a, w) for a, w in zip(addends, wide, strict=True) if a is not None]
        if pairs:
            _torch._foreach_add_([a for a, _ in pairs], [w for _, w in pairs])
        return [w if a is None else a for a, w in zip(addends, wide, strict=True)]

    @torch.no_grad()
    def cast_copy_(self, sources: Tensors, targets: Tensors) -> None:
        """See `preamp.kernels.ops.Ops.cast_copy_`."""
        if targets:
            copy_(targets, sources)

    @torch.no_grad()
    def axpby_(self, targets: Tensors, a: Factor, xs: Tensors, b: Factor, ys: Column) -> None:
        """See `preamp.kernels.ops.Ops.axpby_`."""
        check_lengths(targets, xs, ys)
        columns, odd = regular(targets, xs, ys)
        if odd:
            outs, ins = ([column[i] for i in odd] for column in (targets, xs))
            REFERENCE.axpby_(outs, a, ins, b, [ys[i] for i in odd])
        for outs, ins, others in by_dtype(*columns):
            x_dtype = math_dtype(ins[0].dtype)
            y_dtype = x_dtype if others[0] is None else math_dtype(others[0].dtype)
            by_x, by_y = _beside(a, outs[0], x_dtype), _beside(b, outs[0], y_dtype)
            for block in self._blocks(x_dtype, outs, ins, others):
                wide = block.flat(1, x_dtype) * by_x
                if others[0] is not None:
                    wide = wide + block.flat(2, y_dtype) * by_y
                block.write(0, wide)

    def _multiply_(self, tensors: Tensors, by: Factor) -> None:
        """Multiply dense tensors of one dtype, that of the factor."""
        is_tensor = isinstance(by, torch.Tensor) and by.dtype is torch.float32
        if is_tensor and tensors[0].dtype is torch.float32 and self._is_near(tensors[0]):
            # On a CPU a quarter of the time of `_foreach_mul_`; what it finds is not looked at.
            found = torch.zeros((), dtype=torch.float32, device="cpu")
            _torch._amp_foreach_non_finite_check_and_unscale_(tensors, found, by)
            torch.autograd.graph.increment_version(tensors)  # which it does not tell autograd of
        else:
            _torch._foreach_mul_(tensors, by)

    def _blocks(self, dtype: torch.dtype, leaders: Tensors, *columns: Column) -> Iterator[Block]:
        """The blocks of some lists; those of `dtype` are joined in memory that is kept."""
        near, every = self._is_near(leaders[0]), (leaders, *columns)
        plan = plan_of(shapes_of(leaders), self._large(near=near))
        with plan.workspaces(dtype, len(every) if near else 0) as spaces:
            for cut in plan.cuts:
                yield from blocks_of(plan, cut, every, spaces)


def _beside(factor: Factor, tensor: torch.Tensor, dtype: torch.dtype) -> Factor:
    return factor.to(tensor.device, dtype) if isinstance(factor, torch.Tensor) else factor
