# SPDX-License-Identifier: BSD-3-Clause
"""Gradients that overflowed, read once more where the host is near."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch

_BLOCK = 1 << 20  # elements: temporaries of a large gradient stay small


@torch.no_grad()
def read_again(
    grads: Sequence[torch.Tensor], max_abs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the overflowing ``grads`` on the CPU for their largest finite magnitude.

    Args:
        grads: All gradients. Not mutated.
        max_abs: Largest magnitude of each, infinite or nan for those that overflowed; also
            infinite for finite float64 values beyond float32.

    Returns:
        ``max_abs`` without that exception, and in float64 the largest finite magnitudes: nan
        where they are not known, which includes all gradients that did not overflow. Synchronises
        only with the device of ``max_abs``.
    """
    max_abs = max_abs.clone()
    largest = torch.full_like(max_abs, torch.nan, dtype=torch.float64)
    overflowed = cast("Any", (~torch.isfinite(max_abs)).nonzero().flatten()).tolist()
    for place in cast("list[int]", overflowed):
        grad = grads[place]
        if grad.device.type != "cpu":
            continue
        values: torch.Tensor = cast("Any", grad.coalesce()).values() if grad.is_sparse else grad
        values = torch.view_as_real(values) if values.is_complex() else values
        found, is_finite = _largest_finite(values.reshape(-1))
        largest[place] = found
        if is_finite:
            max_abs[place] = 0.0
    return max_abs, largest


def _largest_finite(values: torch.Tensor) -> tuple[float, bool]:
    """The largest finite magnitude, 0 if there is none, and whether all are finite."""
    largest, all_finite = 0.0, True
    for start in range(0, values.numel(), _BLOCK):
        block = values[start : start + _BLOCK]
        finite = torch.isfinite(block)
        all_finite = all_finite and bool(finite.all())
        low, high = torch.aminmax(torch.where(finite, block, 0))
        largest = max(largest, abs(float(low)), abs(float(high)))
    return largest, all_finite
