# SPDX-License-Identifier: BSD-3-Clause
"""Scaling, adding and casting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels import reference
from preamp.kernels.foreach.blocks import Column, parts, regular
from preamp.kernels.foreach.sizes import elements
from preamp.kernels.ops import Tensors

_torch: Any = torch
Factor = torch.Tensor | float


def _beside(factor: Factor, tensor: torch.Tensor, dtype: torch.dtype) -> Factor:
    return factor.to(tensor.device, dtype) if isinstance(factor, torch.Tensor) else factor


def _by_dtype(*columns: Column) -> list[list[list[Any]]]:
    """Sort places by the dtypes of their tensors."""
    sorted_: dict[tuple[Any, ...], list[list[Any]]] = {}
    for row in zip(*columns, strict=True):
        key = tuple(None if tensor is None else tensor.dtype for tensor in row)
        for column, tensor in zip(sorted_.setdefault(key, [[] for _ in columns]), row, strict=True):
            column.append(tensor)
    return list(sorted_.values())


@torch.no_grad()
def scale_add_(grads: Tensors, factor: Factor, addends: Column) -> None:
    """See `preamp.kernels.ops.Ops.scale_add_`."""
    columns, odd = regular(grads, addends)
    if odd:
        reference.scale_add_([grads[i] for i in odd], factor, [addends[i] for i in odd])
    for targets, others in _by_dtype(*columns):
        dtype = math_dtype(targets[0].dtype)
        by = _beside(factor, targets[0], dtype)
        if targets[0].dtype is dtype and others[0] is None:
            _torch._foreach_mul_(targets, by)
            continue
        for part in parts(elements(), targets, others):
            for block in part.blocks:
                wide = block.flat(0, dtype) * by
                if others[0] is not None:
                    wide += block.flat(1, dtype)
                block.write(0, wide)


@torch.no_grad()
def widen_add(
    halves: Tensors, factors: Sequence[torch.Tensor], addends: Column
) -> list[torch.Tensor]:
    """See `preamp.kernels.ops.Ops.widen_add`."""
    if any(half.layout is not torch.strided for half in halves):
        return reference.widen_add(halves, factors, addends)
    kept = torch.preserve_format
    wide = [torch.empty_like(h, dtype=torch.float32, memory_format=kept) for h in halves]
    if not wide:
        return []
    _torch._foreach_copy_(wide, list(halves))
    _torch._foreach_mul_(wide, [by.to(w.device) for by, w in zip(factors, wide, strict=True)])
    pairs = [(a, w) for a, w in zip(addends, wide, strict=True) if a is not None]
    if pairs:
        _torch._foreach_add_([a for a, _ in pairs], [w for _, w in pairs])
    return [w if a is None else a for a, w in zip(addends, wide, strict=True)]


@torch.no_grad()
def cast_copy_(sources: Tensors, targets: Tensors) -> None:
    """See `preamp.kernels.ops.Ops.cast_copy_`."""
    if targets:
        _torch._foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def axpby_(targets: Tensors, a: Factor, xs: Tensors, b: Factor, ys: Column) -> None:
    """See `preamp.kernels.ops.Ops.axpby_`."""
    columns, odd = regular(targets, xs, ys)
    if odd:
        outs, ins = ([column[i] for i in odd] for column in (targets, xs))
        reference.axpby_(outs, a, ins, b, [ys[i] for i in odd])
    for outs, ins, others in _by_dtype(*columns):
        x_dtype = math_dtype(ins[0].dtype)
        y_dtype = x_dtype if others[0] is None else math_dtype(others[0].dtype)
        for part in parts(elements(), outs, ins, others):
            for block in part.blocks:
                wide = block.flat(1, x_dtype) * _beside(a, ins[0], x_dtype)
                if others[0] is not None:
                    wide = wide + block.flat(2, y_dtype) * _beside(b, ins[0], y_dtype)
                block.write(0, wide)
