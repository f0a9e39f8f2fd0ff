# SPDX-License-Identifier: BSD-3-Clause
"""Counting the binary exponents of a tensor: one pass that most statistics follow from."""

from __future__ import annotations

from typing import Final

import torch

EXPONENTS: Final = range(-149, 128)
"""Exponents that float32 values can have, subnormal ones included."""

ZERO: Final = 0
NONFINITE: Final = 1
BELOW: Final = 2
FIRST: Final = 3
ABOVE: Final = FIRST + len(EXPONENTS)
BINS: Final = ABOVE + 1
_BLOCK: Final = 1 << 18  # elements whose temporaries stay in the cache


def count_exponents(tensor: torch.Tensor) -> torch.Tensor:
    """Count the elements of ``tensor`` by ``floor(log2(abs(x)))``.

    Args:
        tensor: Real floating point, dense; any shape, layout, device. Not mutated.

    Returns:
        int64, shape ``(BINS,)``, on the tensor's device: zeros, infinities and nans, magnitudes
        below ``2**-149`` (float64 only), one count for each of `EXPONENTS`, magnitudes from
        ``2**128`` (float64 only). Does not synchronise.
    """
    flat = tensor.detach().reshape(-1)
    wide = torch.float64 if flat.dtype is torch.float64 else torch.float32
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    step = _BLOCK if flat.device.type == "cpu" else max(flat.numel(), 1)
    for start in range(0, flat.numel(), step):
        _add(counts, flat[start : start + step].to(wide))
    return counts


def _add(counts: torch.Tensor, block: torch.Tensor) -> None:
    exponent = torch.frexp(block).exponent.to(torch.int64) - 1
    bins = (exponent - EXPONENTS.start).clamp_(-1, len(EXPONENTS)).add_(FIRST)
    bins = torch.where(block == 0, ZERO, bins)
    bins = torch.where(torch.isfinite(block), bins, NONFINITE)
    if block.device.type == "cpu":
        counts += torch.bincount(bins, minlength=BINS)
    else:  # bincount waits for the largest value there
        counts.scatter_add_(0, bins, torch.ones_like(bins))
