# SPDX-License-Identifier: BSD-3-Clause
"""Norms and findings of tensors of which this rank holds a part, and others the rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import torch

from preamp.core.away import values_in
from preamp.core.dtypes import HALF_DTYPES, math_dtype
from preamp.core.splits import Groups, Splits
from preamp.core.tensors import locals_of
from preamp.kernels import Census, Ops

_torch = cast("Any", torch)
Tensors = Sequence[torch.Tensor]


def of_all_ranks(census: Census, params: Tensors, with_grad: Tensors, splits: Splits) -> Census:
    """Return ``census`` as it is of all ranks that hold parts of the same parameters.

    Overflow and norm travel in one vector of two numbers, so every census costs one all-reduce
    for each process group that parameters are split over: one with ``fully_shard``. Where no
    parameter is split nothing is sent. Does not wait for the device.

    What it tells of single tensors stays that of this rank. ``params`` are all that might have
    had a gradient.
    """
    if not splits.concern(params) or not (with_grad or splits.given):
        return census
    over = map(splits.of, params)
    vectors, groups = [census.found_inf.double().reshape(1)], [splits.every(over)]
    kinds = set(map(splits.of, with_grad))
    # Else each kind has a sum of its own, and ranks may differ in what kinds they have.
    norm = census.norm if len(kinds) == 1 and not splits.given else None
    if norm is not None:
        vectors.append(norm.double().square().reshape(1))
        groups.append(kinds.pop())
    splits.sum_(vectors, groups)
    return replace(
        census,
        found_inf=(vectors[0] != 0).to(census.found_inf.dtype).reshape(()),
        norm=None if norm is None else vectors[1].sqrt().to(norm.dtype).reshape(()),
    )


def total_norm(
    ops: Ops,
    tensors: Tensors,
    factors: Sequence[torch.Tensor | None],
    params: Tensors,
    splits: Splits,
    device: torch.device,
    order: float = 2.0,
) -> torch.Tensor:
    """Return the norm over all ``tensor * factor``, each split tensor counted as a whole.

    Only the L2 norm takes factors. A tensor that ranks hold copies of counts once. Costs one
    all-reduce of a few numbers for each group that any tensor is split over. The result is float32
    (float64 if a tensor is).
    """
    if not splits.concern(params):
        return _norm_here(ops, tensors, factors, device, order)
    kinds = splits.kinds(map(splits.sums_of, params))
    norms = [
        _norm_here(ops, [tensors[i] for i in own], [factors[i] for i in own], device, order)
        for own in kinds.values()
    ]
    dtype = torch.float64 if any(n.dtype is torch.float64 for n in norms) else torch.float32
    if order == math.inf:
        largest = [norm.double() for norm in norms]
        splits.max_(largest, list(kinds))
        return torch.stack(largest).max().to(dtype)
    powers = [norm.double() ** order for norm in norms]
    splits.sum_(powers, list(kinds))
    return (torch.stack(powers).sum() ** (1.0 / order)).to(dtype)


def _norm_here(
    ops: Ops,
    tensors: Tensors,
    factors: Sequence[torch.Tensor | None],
    device: torch.device,
    order: float,
) -> torch.Tensor:
    """The norm of this rank's parts; halves are summed in float32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if order == 2.0 and torch.float64 not in dtypes:
        return ops.l2norm(tensors, factors, device)
    pairs = zip(locals_of(values_in(tensors)), factors, strict=True)
    pairs = [(tensor, factor) for tensor, factor in pairs if tensor.numel()]  # torch refuses others
    if order != 2.0 and dtypes.isdisjoint(HALF_DTYPES):
        return torch.nn.utils.get_total_norm([part for part, _ in pairs], order).to(device)
    norms: list[torch.Tensor] = []
    for part, factor in pairs:
        dtype = torch.float64 if order == 2.0 else math_dtype(part.dtype)
        norm = _torch.linalg.vector_norm(part, float(order), dtype=dtype)
        norms.append(norm if factor is None else norm * factor)
    return torch.nn.utils.get_total_norm(norms, order).to(device)


def complete_(
    columns: Sequence[torch.Tensor],
    over: Sequence[Sequence[Groups]],
    splits: Splits,
    *,
    largest: bool = False,
) -> None:
    """Turn norms of parts into those of whole tensors, in place: one all-reduce per group.

    ``columns`` have the shape ``(k, n)``, ``k`` norms of each of ``n`` tensors; ``over`` says for
    each of these what it is split over.
    """
    if not any(groups for own in over for groups in own):
        return
    device = columns[0].device
    kinds: dict[Groups, list[tuple[int, int]]] = {}
    for column, own in enumerate(over):
        for place, groups in enumerate(own):
            if groups:
                kinds.setdefault(groups, []).append((column, place))
    vectors: list[torch.Tensor] = []
    for places in kinds.values():
        wide = torch.stack([columns[c][:, i].to(device, torch.float64) for c, i in places])
        vectors.append(wide if largest else wide.square())
    (splits.max_ if largest else splits.sum_)(vectors, list(kinds))
    for vector, places in zip(vectors, kinds.values(), strict=True):
        norms = vector if largest else vector.sqrt()
        for norm, (column, place) in zip(norms, places, strict=True):
            columns[column][:, place].copy_(norm)
