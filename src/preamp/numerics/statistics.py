# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of one tensor: measured on its device, read from it later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.core.dtypes import dtype_name
from preamp.kernels.plain.tally import ABOVE, BELOW, EXPONENTS, FIRST, NONFINITE, ZERO, Tally, tally
from preamp.numerics.formats import NumberFormat
from preamp.numerics.records import TensorStatistics, What


@dataclass(frozen=True, slots=True, eq=False)
class Measured:
    """What a pass over one tensor found, still on its device."""

    tally: Tally
    dtype: torch.dtype  # of the tensor

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

        ``form`` is the half format that shares and headroom are taken against. ``scale`` is the
        loss scale that is on the values: thresholds before scaling are exact for powers of two; for
        other scales they hold to the next lower power. ``with_histogram`` keeps all exponents.
        """
        counts = cast("list[int]", cast("Any", self.tally.counts).tolist())
        max_abs, rms = cast("list[float]", cast("Any", self.tally.extremes).tolist())
        shift = math.floor(math.log2(scale))
        return TensorStatistics(
            name=name,
            what=what,
            dtype=dtype_name(self.dtype),
            form=form.name,
            elements=sum(counts),
            zeros=counts[ZERO],
            nonfinite=counts[NONFINITE],
            below_subnormal=below(counts, form.subnormal_exponent),
            below_normal=below(counts, form.min_exponent),
            unscaled_below_subnormal=below(counts, form.subnormal_exponent + shift),
            unscaled_below_normal=below(counts, form.min_exponent + shift),
            max_abs=max_abs,
            rms=rms,
            scale=scale,
            headroom=form.headroom(max_abs),
            stalled=stalled,
            histogram=_histogram(counts) if with_histogram else None,
        )


def measure(tensors: Sequence[torch.Tensor]) -> list[Measured]:
    """Read tensors for their statistics, which stay on their devices. Does not synchronise.

    They are real floating point and dense, of any shape, layout, device; not mutated. Temporaries
    are small where the elements lie densely, in whatever order.
    """
    return [Measured(tally(tensor), tensor.dtype) for tensor in tensors]


def below(counts: Sequence[int], exponent: int) -> int:
    """How many of the counted values are not zero and less than ``2 ** exponent``."""
    stop = min(max(exponent - EXPONENTS.start, 0), len(EXPONENTS))
    return sum(counts[BELOW : FIRST + stop])


def _histogram(counts: Sequence[int]) -> dict[int, int]:
    """Counts by exponent where there are any; what lies outside joins the nearest exponent."""
    inside = list(counts[FIRST:ABOVE])
    inside[0] += counts[BELOW]
    inside[-1] += counts[ABOVE]
    return {e: count for e, count in zip(EXPONENTS, inside, strict=True) if count}
