# SPDX-License-Identifier: BSD-3-Clause
"""Census and norms in torch's multi-tensor operations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels import reference
from preamp.kernels.foreach.norms import norms_of
from preamp.kernels.joining import stack
from preamp.kernels.ops import Census, Tensors
from preamp.kernels.reference.update import norm

_torch: Any = torch


@torch.no_grad()
def census(
    grads: Tensors, device: torch.device, *, with_norm: bool = False, with_max_abs: bool = True
) -> Census:
    """See `preamp.kernels.ops.Ops.census`."""
    del with_max_abs  # they are how an overflow is found
    places, others = _sort(grads)
    wide = torch.float64 if any(grad.dtype is torch.float64 for grad in grads) else torch.float32
    max_abs = torch.zeros(len(grads), dtype=wide, device=device)
    for dtype, own in places.items():
        found = _torch._foreach_norm([grads[place] for place in own], math.inf, math_dtype(dtype))
        _put(max_abs, own, found)
    found_inf = 1.0 - torch.isfinite(max_abs).all().float()
    if others:
        rest = reference.census([grads[place] for place in others], device)
        found_inf = torch.maximum(found_inf, rest.found_inf)
        if rest.max_abs is not None:
            _put(max_abs, others, rest.max_abs.unbind())
    total = l2norm(grads, [None] * len(grads), device) if with_norm else None
    return Census(found_inf=found_inf, norm=total, max_abs=max_abs.float())


@torch.no_grad()
def l2norms(tensors: Tensors, factor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.l2norms`."""
    places, others = _sort(tensors)
    norms = torch.zeros(len(tensors), dtype=torch.float32, device=device)
    for dtype, own in places.items():
        values = [tensors[place] for place in own]
        math = math_dtype(dtype)
        if factor is not None:
            values = _torch._foreach_mul([v.to(math) for v in values], factor.to(values[0].device))
        _put(norms, own, norms_of(values, dtype=math))
    if others:
        rest = reference.l2norms([tensors[place] for place in others], factor, device)
        _put(norms, others, rest.unbind())
    return norms


@torch.no_grad()
def l2norm(
    tensors: Tensors, factors: Sequence[torch.Tensor | None], device: torch.device
) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.l2norm`."""
    norms = l2norms(tensors, None, device)
    if any(factor is not None for factor in factors):
        one = torch.ones((), dtype=torch.float32, device=device)
        norms = norms * stack([one if by is None else by.to(device) for by in factors])
    return norm(norms)


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
    _torch._foreach_copy_([target[place] for place in places], list(values))
