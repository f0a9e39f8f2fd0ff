# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of one tensor: measured on its device, read from it later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.dtypes import dtype_name, math_dtype
from preamp.numerics import exponents
from preamp.numerics.exponents import EXPONENTS, blocks_of, count_exponents
from preamp.numerics.formats import NumberFormat
from preamp.numerics.records import TensorStatistics, What


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a pass over one tensor found, still on its device.

    Attributes:
        counts: Of `count_exponents`.
        extremes: float32 (float64 for float64 tensors), shape ``(2,)``: largest finite magnitude,
            and root mean square of the finite values.
        dtype: Of the tensor.
    """

    counts: torch.Tensor
    extremes: torch.Tensor
    dtype: torch.dtype

    def read(
        self,
        name: str,
        what: What,
        form: NumberFormat,
        *,
        scale: float = 1.0,
        stalled: int | None = None,
        with_histogram: bool = False,
    ) -> TensorStatistics:
        """Turn it into a record. Synchronises with the device.

        Args:
            name: Of the tensor.
            what: What the tensor is.
            form: The half format that shares and headroom are taken against.
            scale: The loss scale that is on the values. Thresholds before scaling are exact for
                powers of two; for other scales they hold to the next lower power.
            stalled: See `TensorStatistics`.
            with_histogram: Whether to keep all exponents.
        """
        counts = cast("list[int]", cast("Any", self.counts).tolist())
        max_abs, rms = cast("list[float]", cast("Any", self.extremes).tolist())
        shift = math.floor(math.log2(scale))
        return TensorStatistics(
            name=name,
            what=what,
            dtype=dtype_name(self.dtype),
            form=form.name,
            elements=sum(counts),
            zeros=counts[exponents.ZERO],
            nonfinite=counts[exponents.NONFINITE],
            below_subnormal=_below(counts, form.subnormal_exponent),
            below_normal=_below(counts, form.min_exponent),
            unscaled_below_subnormal=_below(counts, form.subnormal_exponent + shift),
            unscaled_below_normal=_below(counts, form.min_exponent + shift),
            max_abs=max_abs,
            rms=rms,
            scale=scale,
            headroom=form.headroom(max_abs),
            stalled=stalled,
            histogram=_histogram(counts) if with_histogram else None,
        )


def measure(tensor: torch.Tensor) -> Measured:
    """Read ``tensor`` for its statistics.

    Args:
        tensor: Real floating point, dense; any shape, layout, device. Not mutated.

    Returns:
        What was found, on the tensor's device. Does not synchronise. Temporaries are small
        where the elements lie densely, in whatever order.
    """
    flat = exponents.flat_of(tensor)
    counts = count_exponents(flat)
    nonfinite = counts[exponents.NONFINITE]
    # Where the host is near, one look spares masking them in two passes.
    is_finite = exponents.host_reaches(flat) and not bool(nonfinite)
    extremes = _extremes(flat, flat.numel() - nonfinite, is_finite=is_finite)
    return Measured(counts, extremes, flat.dtype)


def _extremes(flat: torch.Tensor, finite: torch.Tensor, *, is_finite: bool) -> torch.Tensor:
    """Largest finite magnitude and root mean square, without under- or overflow of squares.

    ``finite`` values are finite; ``is_finite`` if all are known to be.
    """
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


def _below(counts: Sequence[int], exponent: int) -> int:
    """How many values are not zero and less than ``2 ** exponent``."""
    stop = min(max(exponent - EXPONENTS.start, 0), len(EXPONENTS))
    return sum(counts[exponents.BELOW : exponents.FIRST + stop])


def _histogram(counts: Sequence[int]) -> dict[int, int]:
    """Counts by exponent where there are any; what lies outside joins the nearest exponent."""
    inside = list(counts[exponents.FIRST : exponents.ABOVE])
    inside[0] += counts[exponents.BELOW]
    inside[-1] += counts[exponents.ABOVE]
    return {e: count for e, count in zip(EXPONENTS, inside, strict=True) if count}
