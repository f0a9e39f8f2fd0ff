# SPDX-License-Identifier: BSD-3-Clause
"""Tensors of every dtype and magnitude, and what numpy says of them in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ENOUGH_FOR_A_TABLE = 1 << 13  # elements from which patterns are counted instead of values

magnitudes = st.one_of(
    st.floats(min_value=1e-45, max_value=1e38),
    st.integers(-149, 127).map(lambda exponent: 2.0**exponent),
    st.integers(-149, 127).map(lambda exponent: math.nextafter(2.0**exponent, 0.0)),
    st.sampled_from((0.0, math.inf, math.nan, 65504.0, 1e-300, 1e300, 5e-324)),
)
values = st.tuples(magnitudes, st.booleans()).map(lambda pair: -pair[0] if pair[1] else pair[0])
dtypes = st.sampled_from(DTYPES)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """A tensor of a few values, or of so many of them that patterns are counted."""
    few = torch.tensor(draw(st.lists(values, max_size=40)), dtype=torch.float64)
    few = few.to(draw(dtypes))
    if len(few) and draw(st.booleans()):
        few = few.repeat(ENOUGH_FOR_A_TABLE // len(few) + 1)
    return few


def exactly(tensor: torch.Tensor) -> Any:
    """The values as float64, by their bits: no processor flag can flush them."""
    wide = tensor.detach().reshape(-1).contiguous()
    if wide.dtype is torch.bfloat16:
        bits = wide.view(torch.int16).numpy().astype(np.int32) << 16
        return _widened(bits.view(np.float32))
    return _widened(wide.numpy())


def _widened(values: Any) -> Any:
    with np.errstate(invalid="ignore"):  # numpy tells of every signalling nan
        return values.astype(np.float64)


def exponents(finite: Any) -> Any:
    """``floor(log2(abs(x)))`` of values that are not zero."""
    return np.frexp(finite)[1] - 1
