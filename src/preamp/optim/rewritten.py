# SPDX-License-Identifier: BSD-3-Clause
"""What a script has written to gradients: zeros, one factor on all of a gradient, or else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch

from preamp.core.away import values_of, zeros_away
from preamp.core.dtypes import dtype_name
from preamp.core.errors import bad_state
from preamp.core.splits import Splits
from preamp.core.tensors import local_of

_BLOCK = 1 << 22  # elements: temporaries of a large gradient stay small


def negative_zeros(param: torch.Tensor, *, waits: bool) -> torch.Tensor:
    """Zeros unlike those of a script; without memory if gradients of ``param`` wait elsewhere."""
    return zeros_away(param) if waits and param.is_cuda else torch.full_like(param, -0.0)


def is_zeroed(grad: torch.Tensor) -> bool:
    """Whether ``grad`` is zeros as a script leaves them, all without a sign. Synchronises."""
    local = local_of(values_of(grad))
    return not bool(local.any()) and not bool(torch.signbit(local).any())


def has_nonzero(grad: torch.Tensor) -> bool:
    """Whether ``grad`` has a value other than zero; nan counts. Synchronises."""
    values = values_of(grad)
    return bool((values.coalesce().values() if values.is_sparse else values).any())


def read_back(
    bases: Mapping[int, Any],
    now: Mapping[int, Any],
    params: Mapping[int, torch.Tensor],
    names: Sequence[str],
    splits: Splits | None = None,
    *,
    is_plain: bool,
) -> dict[int, float | None]:
    """Return what to multiply each float32 gradient by; ``None`` to take the half one as it is.

    So nothing is lost that a half gradient cannot hold. Arguments are those of `factors_of`, with
    the ``names`` of parameters, and whether gradients were never scaled (``is_plain``).

    Raises `PreampStateError` for a float16 gradient that was rewritten in another way, and for one
    that a clip by an infinite norm has left zeros of.
    """
    found, common = factors_of(bases, now, params, splits)
    for row, grad in now.items():
        if found[row] == 0.0 and not is_zeroed(grad):  # by a clip
            if common is None:
                raise bad_state(
                    f"The {dtype_name(grad.dtype)} gradient of {names[row]!r} was multiplied by "
                    "zero, as a clip does whose norm is infinite",
                    "The norm of half gradients is a half number in torch, and 65504 the largest "
                    "in float16",
                    "Clip with preamp.clip_grad_norm_(optimizer, max_norm), which needs no "
                    "unscale_",
                )
            found[row] = common  # which left nothing of what was small
        elif found[row] is None and grad.dtype is torch.float16 and not is_plain:
            raise bad_state(
                f"The {dtype_name(grad.dtype)} gradient of {names[row]!r} was changed after "
                "unscale_, and not by one factor as clipping by norm does",
                "Unscaled, values below 6e-8 are zero in float16, and those below 6e-5 imprecise, "
                "so a step cannot take them from there",
                "Call preamp.clip_grad_value_(optimizer, clip_value), change the float32 gradients "
                "of preamp.master_params(optimizer), or train in bfloat16 (O5)",
            )
    return found


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
