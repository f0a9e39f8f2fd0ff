# SPDX-License-Identifier: BSD-3-Clause
"""Whether weights were trained in bfloat16, and what float16 would do to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch

from preamp.numerics import FORMATS

_SAMPLE = 4096
_FEWEST = 256
_FEWEST_VALUES = 64
_MOST = 0.9


@dataclass(frozen=True, slots=True)
class WeightRange:
    """Of all weights in matrices with the digits of bfloat16.

    Attributes:
        elements: How many there are.
        nonzero: How many are not zero.
        vanishing: How many of those round to zero in float16.
        max_abs: The largest magnitude; infinite if a cast has overflowed already.
    """

    elements: int
    nonzero: int
    vanishing: int
    max_abs: float


@torch.no_grad()
def weight_range(params: Iterable[torch.Tensor]) -> WeightRange | None:
    """Return the range of ``params`` if most of them come from bfloat16. Synchronises.

    Vectors, small tensors and tensors of few different values, such as freshly made ones, say
    nothing and are left out. ``None`` unless nine tenths of the weights that say something are
    exact in bfloat16.
    """
    matrices = [
        param.detach()
        for param in params
        if param.dim() > 1 and param.numel() >= _FEWEST and param.is_floating_point()
        if param.layout is torch.strided and param.device.type != "meta"
    ]
    telling = [matrix for matrix in matrices if _has_many_values(matrix)]
    exact = [matrix for matrix in telling if _is_exact(matrix.reshape(-1)[:_SAMPLE])]
    exact = [matrix for matrix in exact if _is_exact(matrix)]
    elements = sum(matrix.numel() for matrix in exact)
    if not elements or elements < _MOST * sum(matrix.numel() for matrix in telling):
        return None
    # Half of the smallest positive value rounds to even, which is zero.
    limit = FORMATS["float16"].smallest_subnormal / 2
    nonzero = vanishing = 0
    max_abs = 0.0
    for matrix in exact:
        magnitude = matrix.abs()
        nonzero += int((magnitude > 0).sum())
        vanishing += int(((magnitude > 0) & (magnitude <= limit)).sum())
        max_abs = max(max_abs, float(magnitude.max()))
    return WeightRange(elements, nonzero, vanishing, max_abs)


def _has_many_values(matrix: torch.Tensor) -> bool:
    sample = matrix.reshape(-1)[:_SAMPLE]
    return len(set(cast("Any", sample.float()).tolist())) >= _FEWEST_VALUES


def _is_exact(values: torch.Tensor) -> bool:
    return bool((values.bfloat16().to(values.dtype) == values).all())
