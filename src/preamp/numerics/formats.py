# SPDX-License-Identifier: BSD-3-Clause
"""The ranges of number formats, as powers of two."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """What a floating-point format can represent."""

    name: str  # such as ``"float16"``
    largest: float  # the largest finite value
    min_exponent: int  # the smallest normal value is ``2 ** min_exponent``
    mantissa_bits: int  # bits behind the point

    @property
    def subnormal_exponent(self) -> int:
        """The smallest positive value of all is two to this power."""
        return self.min_exponent - self.mantissa_bits

    @property
    def smallest_subnormal(self) -> float:
        """The smallest positive value of all."""
        return 2.0**self.subnormal_exponent

    @property
    def max_exponent(self) -> int:
        """``floor(log2(largest))``."""
        return math.frexp(self.largest)[1] - 1

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
    )
}
"""By the name of their torch dtype."""
