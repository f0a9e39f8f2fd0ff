# SPDX-License-Identifier: BSD-3-Clause
"""Census and norms: what is read and not written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from preamp.core.dtypes import math_dtype
from preamp.kernels import reference
from preamp.kernels.cpu.sizes import large
from preamp.kernels.foreach.blocks import flatten, regular, split
from preamp.kernels.foreach.norms import norms_of
from preamp.kernels.joining import stack
from preamp.kernels.ops import Census, Tensors
from preamp.kernels.reference.update import norm

_CPU = torch.device("cpu")
_SMALL = 1 << 16
"""Elements up to which joining tensors costs less than calls of their own."""


@torch.no_grad()
def census(
    grads: Tensors, device: torch.device, *, with_norm: bool = False, with_max_abs: bool = True
) -> Census:
    """See `preamp.kernels.ops.Ops.census`.

    Which tensors an overflow is in is looked for only where there is one.
    """
    (column,), odd = regular(grads)
    norm = l2norm(grads, [None] * len(grads), _CPU) if with_norm else None
    if norm is not None and bool(torch.isfinite(norm)):
        found_inf = torch.zeros((), dtype=torch.float32, device=_CPU)  # no need to look further
    else:
        found_inf = _found_inf(column)
        if odd:
            rest = reference.census([grads[i] for i in odd], _CPU)
            found_inf = torch.maximum(found_inf, rest.found_inf)
    max_abs = None
    if with_max_abs or found_inf != 0:
        max_abs = reference.census(grads, device).max_abs
    return Census(found_inf.to(device), None if norm is None else norm.to(device), max_abs)


@torch.no_grad()
def l2norms(tensors: Tensors, factor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.l2norms`."""
    (column,), odd = regular(tensors)
    by = None if factor is None else factor.to(_CPU)
    norms = _stack([_total(_norms([tensor], by)) for tensor in column])
    if odd:
        more = reference.l2norms([tensors[i] for i in odd], by, _CPU)
        norms, kept = norms.new_empty(len(tensors)), norms
        is_odd = torch.zeros(len(tensors), dtype=torch.bool, device=_CPU)
        is_odd[odd] = True
        norms[is_odd], norms[~is_odd] = more, kept
    return norms.to(device)


@torch.no_grad()
def l2norm(
    tensors: Tensors, factors: Sequence[torch.Tensor | None], device: torch.device
) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.l2norm`."""
    by_factor: dict[int, tuple[torch.Tensor | None, list[torch.Tensor]]] = {}
    for tensor, factor in zip(tensors, factors, strict=True):
        by_factor.setdefault(id(factor), (factor, []))[1].append(tensor)
    norms: list[torch.Tensor] = []
    for factor, own in by_factor.values():
        (column,), odd = regular(own)
        found = _norms_of_any(column)
        found += [reference.l2norms([own[i] for i in odd], None, _CPU)] if odd else []
        norm = _total(found)
        norms.append(norm if factor is None else norm * factor.to(_CPU))
    return _total(norms).to(device)


def _sharing(column: Tensors) -> Iterator[torch.Tensor]:
    """The tensors, small ones of a dtype joined to a block; empty ones are left out."""
    joined: dict[torch.dtype, list[torch.Tensor]] = {}
    room: dict[torch.dtype, int] = {}
    for tensor in column:
        size, dtype = tensor.numel(), tensor.dtype
        if size > _SMALL:
            yield tensor
        elif size:
            if size > room.get(dtype, 0):
                if dtype in joined:
                    yield flatten(joined[dtype])
                joined[dtype], room[dtype] = [], large()
            joined[dtype].append(tensor)
            room[dtype] -= size
    yield from map(flatten, joined.values())


def _found_inf(column: Tensors) -> torch.Tensor:
    """1.0 if there is an infinite value or nan; nan is both the smallest and the largest."""
    ends = [end for tensor in _sharing(column) for end in torch.aminmax(tensor)]
    return (~torch.isfinite(_stack(ends)).all()).float()


def _norms_of_any(column: Tensors) -> list[torch.Tensor]:
    """Norms that together are the norm of all, in no order."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in _sharing(column):
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    return [norm for tensors in by_dtype.values() for norm in _norms(tensors)]


def _norms(tensors: Tensors, factor: torch.Tensor | None = None) -> list[torch.Tensor]:
    """Norms of tensors of one dtype or of pieces of them, multiplied by ``factor`` before."""
    dtype = math_dtype(tensors[0].dtype)
    if factor is None and dtype is tensors[0].dtype:
        return norms_of(tensors)
    # torch would widen half tensors as a whole, into memory that it asks for each time.
    wide = torch.empty(min(large(), max(map(torch.numel, tensors))), dtype=dtype, device=_CPU)
    found: list[torch.Tensor] = []
    for tensor in tensors:
        for piece in split(tensor, large()):
            values = wide[: piece.numel()].copy_(piece)
            found.append(norm(values if factor is None else values.mul_(factor)))
    return found


def _stack(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """One vector of scalars of any float dtype."""
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1:  # finite float64 values may lie beyond float32's range
        wide = torch.float64 if torch.float64 in dtypes else torch.float32
        values = [value.to(wide) for value in values]
    return stack(list(values)) if values else torch.zeros(0, dtype=torch.float32, device=_CPU)


def _total(norms: Sequence[torch.Tensor]) -> torch.Tensor:
    values = _stack([value for norm in norms for value in norm.reshape(-1).unbind()])
    return norm(values).float()
