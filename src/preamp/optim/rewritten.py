# SPDX-License-Identifier: BSD-3-Clause
"""What a script has done to half gradients: multiplied them, as clipping does, or something else.

A half number ``after`` is ``before * factor``, rounded once or twice, if it is no further from it
than its own spacing. So every element allows the factors of an interval, and what lies in the
intervals of all elements explains them all. With thousands of elements the middle of what is left
is far more precise than any of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import cast

import torch

from preamp.core.errors import message
from preamp.core.tensors import local_of, runs_of

Agree = Callable[[list[torch.Tensor], Sequence[torch.Tensor]], None]
"""Takes the largest value of each place over all ranks that hold parts: of vectors, in place, each
of one of the parameters."""

_BLOCK = 1 << 22  # elements: temporaries of a large gradient stay small
_CACHED = 1 << 16  # on a CPU, whose cache then holds them
_NOTHING = (-math.inf, -math.inf, -math.inf, -math.inf, 0.0, 0.0, 0.0)
_HALVES = (torch.bfloat16, torch.float16)
Interval = tuple[float, float]
_Grads = Sequence[torch.Tensor]


def common_factors(
    before: Sequence[torch.Tensor | None],
    after: Sequence[torch.Tensor | None],
    params: Sequence[torch.Tensor],
    agree: Agree | None = None,
) -> list[float | None]:
    """Return for each gradient the factor that it was multiplied by, ``None`` if there is none.

    One factor for all of them is preferred, then one for each. Gradients that are zero now have
    the factor 0, unless one for all may have left that of them; those that were zero before have
    the common one, else 1. Synchronises once, or twice where there is no one factor for all.

    Args:
        before: Half gradients; ``None`` for one that only other ranks have.
        after: The same later, of the same dtypes and shapes.
        params: Their parameters, for ``agree``.
        agree: For parameters that ranks have parts of; all ranks then return the same.
    """
    if agree is None and len(before) > 1:
        factor = _joint_factor(cast("_Grads", before), cast("_Grads", after))
        if factor is not None:
            return [factor] * len(before)
    pairs = zip(before, after, params, strict=True)
    found = [_bounds(old, new, param.device) for old, new, param in pairs]
    if agree is not None:
        agree(found, params)
    device = found[0].device
    values = torch.stack([one.to(device) for one in found]).tolist()  # pyright: ignore
    rows = [_Row(*row) for row in cast("list[tuple[float, ...]]", values)]
    telling = [row for row in rows if row.was_nonzero and not row.is_emptied]
    common = None
    if telling:
        once, twice = (_intersection(map(which, telling)) for which in (_once, _twice))
        common = _factor_in(once, twice, differs=any(row.differs for row in telling))
    return [row.factor(common) for row in rows]


def _joint_factor(before: _Grads, after: _Grads) -> float | None:
    """The one factor of all, if there is one and some values are left. Synchronises.

    A few operations for as many gradients as fit in a block, and not for each.
    """
    alike: dict[object, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for old, new in zip(map(local_of, before), map(local_of, after), strict=True):
        olds, news = alike.setdefault((old.dtype, old.device), ([], []))
        olds.append(old)
        news.append(new)
    found = [
        _bounds(_joined(olds[run]), _joined(news[run]), olds[0].device)
        for olds, news in alike.values()
        for run in runs_of(olds, _block(olds[0]))
    ]
    largest = torch.stack([one.to(found[0].device) for one in found]).amax(0)
    row = _Row(*cast("list[float]", largest.tolist()))  # pyright: ignore
    return None if row.is_emptied else row.factor(None)


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Their values in one row; a single tensor itself, which may be large."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def likely_factor(before: Sequence[torch.Tensor], after: Sequence[torch.Tensor]) -> torch.Tensor:
    """A number of their dtype that a few values were all multiplied by; nan without one.

    A float32 scalar. Does not synchronise.
    """
    old, new = (torch.cat(list(few)) for few in (before, after))
    found = _bounds(old, new, old.device)
    (low, lower), (high, higher) = found[0:4:2], -found[1:4:2]
    was_once = low <= high  # else rounded twice
    low, high = torch.where(was_once, low, lower), torch.where(was_once, high, higher)
    half = ((low + high) / 2).to(old.dtype).float()
    is_one = (low <= half) & (half <= high)
    is_same = (found[6] == 0) & (low <= high)
    return torch.where(is_same, 1.0, torch.where(is_one, half, math.nan))


class _Row:
    """What one gradient tells."""

    def __init__(self, *bounds: float) -> None:
        low, minus_high, lower, minus_higher, was_nonzero, is_nonzero, differs = bounds
        self.once, self.twice = (low, -minus_high), (lower, -minus_higher)
        self.was_nonzero, self.differs = bool(was_nonzero), bool(differs)
        self.is_emptied = bool(was_nonzero) and not is_nonzero

    def factor(self, common: float | None) -> float | None:
        if self.is_emptied:
            return 0.0
        own = _factor_in(self.once, self.twice, differs=self.differs)
        if own is None or common is None:
            return own
        return common


_once, _twice = attrgetter("once"), attrgetter("twice")


def _intersection(intervals: Iterable[Interval]) -> Interval:
    lows, highs = zip(*intervals, strict=True)
    return max(lows), min(highs)


def _factor_in(once: Interval, twice: Interval, *, differs: bool) -> float | None:
    """A factor in one of two intervals, better in the first; ``None`` if both are empty."""
    low, high = once if once[0] <= once[1] else twice
    if low > high:
        return None
    if not differs:
        return 1.0
    middle = (low + high) / 2
    # Norms of half gradients are half numbers in torch, and so are the factors made of them.
    for dtype in _HALVES:
        half = torch.tensor(middle, dtype=dtype).item()
        if low <= half <= high:
            return half
    return middle


def _bounds(
    before: torch.Tensor | None, after: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """What is found as float32 numbers, of which ranks take the largest.

    They are the lower end of the interval of factors, and minus the upper one, if products were
    rounded once; the same if twice; and whether any element was not zero, is not zero, differs.
    """
    found = torch.tensor(_NOTHING, device=device)
    if before is None or after is None:
        return found
    before, after = local_of(before), local_of(after)
    kind = torch.finfo(before.dtype)
    spacing = kind.smallest_normal * kind.eps
    flat = [tensor.detach().reshape(-1) for tensor in (before, after)]
    size = _block(before)
    for start in range(0, before.numel(), size):
        # Comparisons and choices cost a CPU ten times what arithmetic does, so what tells nothing
        # becomes nan: 0 / 0, and infinities minus themselves.
        old, new = (tensor[start : start + size].float() for tensor in flat)
        old, new = (tensor + (tensor - tensor) for tensor in (old, new))
        ratio = new / old
        width = new.abs().mul_(kind.eps).add_(spacing).div_(old).abs_().mul_(0.5 + 2**-10)
        ends = [_largest(sign * ratio - width * times) for times in (1, 2) for sign in (1, -1)]
        # Nothing makes a number of zero, or of an infinity.
        is_none = (_largest(ratio.abs()) == math.inf) | (old.isnan() != new.isnan()).any()
        ends = [torch.where(is_none, math.inf, end) for end in ends]
        flags = [_largest(one.abs()) > 0 for one in (old, new, new - old)]
        here = torch.stack([*ends, *(flag.float() for flag in flags)])
        found = torch.maximum(found, here)
    return found


def _block(tensor: torch.Tensor) -> int:
    """How many elements are looked at together."""
    return _CACHED if tensor.device.type == "cpu" else _BLOCK


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.nan_to_num_(-math.inf, math.inf, -math.inf).max()


def rewritten_in_half(name: str) -> str:
    """Warning: gradients are taken from a float16 one that a script has written."""
    return message(
        f"The float16 gradient of {name!r} was changed after unscale_, and not by one factor as "
        "clipping by norm does",
        "It is taken as it was written; unscaled, values below 6e-8 are zero in float16, and those "
        "below 6e-5 imprecise",
        "Change the float32 gradients of preamp.master_params(optimizer) instead, or train in "
        "bfloat16 (O4, O5)",
    )
