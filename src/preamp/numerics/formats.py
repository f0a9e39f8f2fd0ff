# SPDX-License-Identifier: BSD-3-Clause
"""The ranges of number formats, as powers of two."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """What a floating-point format can represent."""

    name: str  # such as ``"float16"``
    largest: float  # the largest finite value
    min_exponent: int  # the smallest normal value is ``2 ** min_exponent``
    mantissa_bits: int  # bits behind the point

    @property
    def smallest_normal(self) -> float:
        """The smallest value with all its digits."""
        return 2.0**self.min_exponent

    @property
    def subnormal_exponent(self) -> int:
        """The smallest positive value of all is two to this power."""
        return self.min_exponent - self.mantissa_bits

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value of all."""
        return 2.0**self.subnormal_exponent

    @property
    def largest_lost(self) -> float:
        """The largest value that rounds to zero: half of the smallest one, since zero is even."""
        return self.smallest_subnormal / 2

    def headroom(self, max_abs: float) -> float | None:
        """``log2(largest / max_abs)``, negative beyond the range; ``None`` for zero."""
        if max_abs <= 0:
            return None
        (mantissa, exponent), (own, top) = math.frexp(max_abs), math.frexp(self.largest)
        return math.log2(own / mantissa) + (top - exponent)  # exact for whole powers


FORMATS: Final = {
    form.name: form
    for form in (
        NumberFormat("float64", torch.finfo(torch.float64).max, -1022, 52),
        NumberFormat("float32", torch.finfo(torch.float32).max, -126, 23),
        NumberFormat("bfloat16", torch.finfo(torch.bfloat16).max, -126, 7),
        NumberFormat("float16", torch.finfo(torch.float16).max, -14, 10),
        # 8-bit formats of Micikevicius et al., "FP8 Formats for Deep Learning" (arXiv:2209.05433).
        NumberFormat("float8_e4m3fn", 448.0, -6, 3),
        NumberFormat("float8_e5m2", 57344.0, -14, 2),
    )
}
"""By the name of their torch dtype."""


def is_eps_zero(options: Mapping[str, Any], form: NumberFormat) -> bool:
    """Whether an optimizer that computes in ``form`` divides by a root plus an eps of zero there.

    Args:
        options: Those of one of its groups, as torch has them or as text. Fused optimizers compute
            in float32, and a sum of squares that does not begin at zero never is.
        form: Of the weights that it updates.
    """
    if str(options.get("fused")) == "True":
        return False
    try:
        added = [float(options["eps"]), float(options.get("initial_accumulator_value", 0.0))]
    except (KeyError, TypeError, ValueError):  # it has none, or several
        return False
    return all(0 <= value <= form.largest_lost for value in added)
