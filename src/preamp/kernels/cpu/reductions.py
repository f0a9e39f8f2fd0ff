# SPDX-License-Identifier: BSD-3-Clause
"""Census and norms: what is read and not written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

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
    lows, highs, norms = _look_at(column, with_norm=with_norm)
    found_inf = (~torch.isfinite(_stack([*lows, *highs])).all()).float()
    if odd:
        rest = reference.census([grads[i] for i in odd], _CPU, with_norm=with_norm)
        found_inf = torch.maximum(found_inf, rest.found_inf)
        norms += [rest.norm] if rest.norm is not None else []
    max_abs = None
    if with_max_abs or found_inf != 0:
        max_abs = reference.census(grads, device).max_abs
    norm = _total(norms).to(device) if with_norm else None
    return Census(found_inf.to(device), norm, max_abs)


@torch.no_grad()
def l2norms(tensors: Tensors, factor: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    """See `preamp.kernels.ops.Ops.l2norms`."""
    (column,), odd = regular(tensors)
    by = None if factor is None else factor.to(_CPU)
    norms = _stack([_total(_scaled_norms(tensor, by)) for tensor in column])
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
        found = [norm for batch in _batches(column) for norm in _norms(batch)]
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


def _look_at(
    column: Tensors, *, with_norm: bool
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Smallest and largest values, and norms if they are asked for, in no order."""
    lows: list[torch.Tensor] = []
    highs: list[torch.Tensor] = []
    norms: list[torch.Tensor] = []
    for batch in _batches(column) if with_norm else (_sharing(column),):
        for tensor in batch:
            low, high = torch.aminmax(tensor)  # in the tensor's own dtype, and nan if there is one
            lows.append(low)
            highs.append(high)
        if with_norm:
            norms += _norms(cast("list[torch.Tensor]", batch))
    return lows, highs, norms


def _batches(column: Tensors) -> Iterator[list[torch.Tensor]]:
    """Tensors of one dtype or pieces of them, at most a block together."""
    most = large()
    batch: list[torch.Tensor] = []
    room = most
    for tensor in _sharing(column):
        for piece in split(tensor, most):
            if batch and (piece.numel() > room or piece.dtype is not batch[0].dtype):
                yield batch
                batch, room = [], most
            batch.append(piece)
            room -= piece.numel()
    if batch:
        yield batch


def _norms(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Norms of tensors of one dtype."""
    return norms_of(tensors, dtype=math_dtype(tensors[0].dtype))


def _scaled_norms(tensor: torch.Tensor, factor: torch.Tensor | None) -> list[torch.Tensor]:
    """Norms of the pieces of one tensor, each multiplied by ``factor`` before it is squared."""
    pieces = split(tensor, large())
    if factor is None:
        return [norm for piece in pieces for norm in _norms([piece])]
    dtype = math_dtype(tensor.dtype)
    return [norm for piece in pieces for norm in _norms([piece.to(dtype) * factor])]


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
