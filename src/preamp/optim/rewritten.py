# SPDX-License-Identifier: BSD-3-Clause
"""By which factor a script has multiplied half gradients, as clipping does, if it was one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from preamp.core.splits import Splits
from preamp.core.tensors import local_of

_BLOCK = 1 << 22  # elements: temporaries of a large gradient stay small


def factors_of(
    bases: Mapping[int, Any],
    now: Mapping[int, Any],
    params: Mapping[int, torch.Tensor],
    splits: Splits | None = None,
) -> tuple[dict[int, float | None], float | None]:
    """Return the factor that each gradient was multiplied by, or ``None``; and the one of all.

    It is the one of the least squares, in float64; the half number next to it where that explains
    as much, since norms of half gradients are half numbers, and so are factors made of them. Every
    element has to lie within its own rounding of the product. Gradients that are zero now have the
    factor 0. Those that were zero before tell nothing, and have that of all others, if these have
    one, else 1. Synchronises once.

    Args:
        bases: By key, the float32 gradients that were shown, rounded.
        now: The half gradients as they are.
        params: The parameters, also of those that only other ranks have.
        splits: Where ranks have parts of parameters; all ranks then return the same.
    """
    sums = {key: _zeros(param, 4) for key, param in params.items()}
    with torch.no_grad():
        for key, grad in now.items():
            sums[key] = _sums(local_of(bases[key]), local_of(grad))
        over = [] if splits is None else [splits.of(param) for param in params.values()]
        if splits is not None:
            splits.sum_(list(sums.values()), over)
        misfits = {key: _zeros(param, 2) for key, param in params.items()}
        tried: dict[int, list[torch.Tensor]] = {}
        for key, grad in now.items():
            squares, products = sums[key][0], sums[key][1]
            factor = torch.where(squares > 0, products / squares, 1.0)
            tried[key] = [factor.to(grad.dtype).double(), factor]
            misfits[key] = _misfits(local_of(bases[key]), local_of(grad), tried[key])
        if splits is not None:
            splits.max_(list(misfits.values()), over)
    told = [torch.cat([sums[key], misfits[key], torch.stack(tried[key])]).cpu() for key in now]
    rows = cast("list[list[float]]", cast("Any", torch.stack(told)).tolist()) if told else []
    found = dict(zip(now, map(_factor, rows), strict=True))
    told_by = zip(found.values(), rows, strict=True)
    telling = [one for one, (squares, *_) in told_by if squares and one != 0.0]
    factors = [one for one in telling if one is not None]
    common = None
    if factors and len(factors) == len(telling):
        low, high = min(factors), max(factors)
        eps = max(torch.finfo(grad.dtype).eps for grad in now.values())
        common = factors[0] if high - low <= eps * max(abs(low), abs(high)) else None
    for key, (squares, _, differs, *_) in zip(now, rows, strict=True):
        if not squares and not differs:
            found[key] = 1.0 if common is None else common
    return found, common


def _factor(row: Sequence[float]) -> float | None:
    squares, _, differs, left, half_misfits, misfits, half, factor = row
    if not differs:
        return 1.0
    if squares > 0 and not left:
        return 0.0
    if not half_misfits and math.isfinite(half):
        return half
    return None if misfits or not math.isfinite(factor) else factor


def _zeros(param: torch.Tensor, count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.float64, device=local_of(param).device)


def _pairs(base: torch.Tensor, now: torch.Tensor) -> Any:
    """The values that were shown and those that are there, in float64, of some elements a time."""
    base, now = base.detach().reshape(-1), now.detach().reshape(-1)
    for start in range(0, now.numel(), _BLOCK):
        few = slice(start, start + _BLOCK)
        yield base[few].to(now.device, now.dtype).double(), now[few].double()


def _sums(base: torch.Tensor, now: torch.Tensor) -> torch.Tensor:
    """Squares of what was there, its products with what is, and how much differs and is left."""
    found = _zeros(now, 4)
    for old, new in _pairs(base, now):
        is_told = torch.isfinite(old) & torch.isfinite(new)
        one, two = torch.where(is_told, old, 0.0), torch.where(is_told, new, 0.0)
        differs = (old != new) & ~(old.isnan() & new.isnan())
        sums = (one.square(), one * two, differs.double(), (new != 0).double())
        found += torch.stack([each.sum() for each in sums])
    return found


def _misfits(base: torch.Tensor, now: torch.Tensor, tried: list[torch.Tensor]) -> torch.Tensor:
    """Whether any element is further from the product with each factor than roundings explain."""
    kind = torch.finfo(now.dtype)
    found = _zeros(now, len(tried))
    for old, new in _pairs(base, now):
        rounding = new.abs() * kind.eps + kind.smallest_normal * kind.eps
        is_odd = torch.isfinite(old) != torch.isfinite(new)
        wrong = [((new - old * factor).abs() > rounding).any() | is_odd.any() for factor in tried]
        found = torch.maximum(found, torch.stack(wrong).double())
    return found
