# SPDX-License-Identifier: BSD-3-Clause
"""Counting the values of a tensor by their exponents, for reports: in plain torch operations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from preamp.core.dtypes import math_dtype
from preamp.core.tensors import host_reaches, local_of, memory_order

_BLOCK_ON_CPU: Final = 1 << 18  # elements whose temporaries stay in the cache
_BLOCK_ELSEWHERE: Final = 1 << 22  # few launches, and temporaries of some tens of megabytes

EXPONENTS: Final = range(-149, 128)
"""Exponents that float32 values can have, subnormal ones included."""

ZERO: Final = 0
NONFINITE: Final = 1
BELOW: Final = 2
FIRST: Final = 3
ABOVE: Final = FIRST + len(EXPONENTS)
BINS: Final = ABOVE + 1


@dataclass(frozen=True, slots=True, eq=False)
class Tally:
    """What a read of one tensor tells of its values; on the tensor's device."""

    # int64, shape ``(BINS,)``: how many are zero, infinite or nan, of a magnitude below 2**-149
    # (float64 only), of each of `EXPONENTS`, of a magnitude from 2**128 (float64 only)
    counts: torch.Tensor
    # float32 (float64 of a float64 tensor), shape ``(2,)``: largest finite magnitude, and root mean
    # square of the finite values
    extremes: torch.Tensor


def flat_of(tensor: torch.Tensor) -> torch.Tensor:
    """All elements in one dimension, in any order; a view where they lie densely."""
    tensor = tensor.detach().resolve_neg()
    return tensor.permute(memory_order(tensor)).reshape(-1).contiguous()


def blocks_of(flat: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views that cover a 1-d tensor, so that no temporary is as large as the whole."""
    step = _BLOCK_ON_CPU if host_reaches(flat) else _BLOCK_ELSEWHERE
    for start in range(0, flat.numel(), step):
        yield flat[start : start + step]


@torch.no_grad()
def tally(tensor: torch.Tensor) -> Tally:
    """Count the values of a tensor by ``floor(log2(abs(x)))``; mutates and waits for nothing.

    It is real floating point and dense, of any shape and layout; of a sharded one this rank's part
    is read. Counts and largest magnitudes are exact. The squares neither overflow nor underflow.
    """
    flat = flat_of(local_of(tensor))
    counts = torch.zeros(BINS, dtype=torch.int64, device=flat.device)
    for block in blocks_of(flat):
        bins = _bins(block)
        if host_reaches(block):
            counts += torch.bincount(bins, minlength=BINS)
        else:  # bincount waits for the largest value there
            bins = bins.to(torch.int64)
            counts.scatter_add_(0, bins, bins.new_ones(()).expand_as(bins))
    nonfinite = counts[NONFINITE]
    # Where the host is near, one look spares masking them in two passes.
    is_finite = host_reaches(flat) and not bool(nonfinite)
    return Tally(counts, _extremes(flat, flat.numel() - nonfinite, is_finite=is_finite))


def _bins(block: torch.Tensor) -> torch.Tensor:
    """The place of each element among the counts; int32, of float64 values int64."""
    if block.dtype is torch.float64:
        bits = block.view(torch.int64) & 0x7FFF_FFFF_FFFF_FFFF
        biased = bits >> 52
        exponent = biased - 1023
        is_nonfinite = biased == 0x7FF
    else:
        bits = block.to(torch.float32).view(torch.int32) & 0x7FFF_FFFF
        biased = bits >> 23
        # A subnormal value is an integer times 2**-149, and an integer has an exponent as a float.
        of_integer = (bits.to(torch.float32).view(torch.int32) >> 23) - 127
        exponent = torch.where(biased == 0, of_integer - 149, biased - 127)
        is_nonfinite = biased == 0xFF
    bins = (exponent - EXPONENTS.start).clamp_(-1, len(EXPONENTS)).add_(FIRST)
    bins = torch.where(bits == 0, ZERO, bins)
    return torch.where(is_nonfinite, NONFINITE, bins)


def _extremes(flat: torch.Tensor, finite: torch.Tensor, *, is_finite: bool) -> torch.Tensor:
    """Largest finite magnitude and root mean square, whose squares neither under- nor overflow."""
    wide = math_dtype(flat.dtype)

    def values(block: torch.Tensor) -> torch.Tensor:
        block = block.to(wide)
        return block if is_finite else block.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)

    largest = torch.zeros((), dtype=wide, device=flat.device)
    for block in blocks_of(flat):
        largest = torch.maximum(largest, values(block).abs().amax())
    unit = torch.where(largest > 0, largest, 1)
    squares = torch.zeros_like(largest)
    for block in blocks_of(flat):
        squares += (values(block) / unit).square_().sum()
    rms = largest * (squares / finite.clamp(min=1)).sqrt()
    return torch.stack((largest, rms))
