# SPDX-License-Identifier: BSD-3-Clause
"""Counts by exponent are exactly what numpy counts, for every dtype, size and layout."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given

from cases.back_ends import every_way
from cases.layouts import LAYOUTS
from numerics import oracle
from preamp.kernels.ops import ABOVE, BELOW, BINS, FIRST, NONFINITE, ZERO
from preamp.numerics import EXPONENTS, FORMATS, measure

every_dtype = pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)


def counts_of(ops: Any, tensor: torch.Tensor) -> list[int]:
    (found,) = ops.tally([tensor])
    return found.counts.tolist()


def expected(tensor: torch.Tensor) -> list[int]:
    values = oracle.exactly(tensor)
    counts = [0] * BINS
    counts[ZERO] = int((values == 0).sum())
    counts[NONFINITE] = int((~np.isfinite(values)).sum())
    for exponent in oracle.exponents(values[np.isfinite(values) & (values != 0)]):
        place = FIRST + int(exponent) - EXPONENTS.start
        counts[min(max(place, BELOW), ABOVE)] += 1
    return counts


@every_way
@given(oracle.tensors())
def test_counts_are_numpys(ops: Any, tensor: torch.Tensor) -> None:
    before = tensor.clone()
    assert counts_of(ops, tensor) == expected(tensor)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


@every_way
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("times", [1, 16])
def test_every_half_value_is_counted_right(ops: Any, dtype: torch.dtype, times: int) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for part in every.split(len(every) if times > 1 else 4096):  # both ways to count
        assert counts_of(ops, part) == expected(part)


@every_way
@every_dtype
def test_every_exponent_is_counted_right(ops: Any, dtype: torch.dtype) -> None:
    powers = 2.0 ** torch.arange(-160, 140, dtype=torch.float64)
    values = torch.cat([powers, -powers * 1.75, powers * (2 - 2.0**-8)]).to(dtype)
    assert counts_of(ops, values) == expected(values)
    many = values.repeat(12)
    assert len(many) > oracle.ENOUGH_FOR_A_TABLE
    assert counts_of(ops, many) == expected(many)


@every_way
@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (8, 4, 20, 30)], ids=str)
def test_layouts(ops: Any, layout: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(0)
    values = (torch.randn(shape, generator=made) * torch.rand(shape, generator=made) ** 30).to(
        dtype
    )
    laid = layout(values)
    assert counts_of(ops, laid) == expected(values)


@every_way
@every_dtype
@pytest.mark.parametrize("shape", [(0,), (2, 0, 3)], ids=str)
def test_nothing_is_counted_in_an_empty_tensor(
    ops: Any, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    assert counts_of(ops, torch.empty(shape, dtype=dtype)) == [0] * BINS


@every_way
@every_dtype
def test_a_scalar_and_a_parameter(ops: Any, dtype: torch.dtype) -> None:
    scalar = torch.tensor(-3.0, dtype=dtype)
    assert counts_of(ops, scalar)[FIRST + 1 - EXPONENTS.start] == 1
    (found,) = measure([torch.nn.Parameter(scalar)])
    assert not found.tally.counts.requires_grad


@every_way
@pytest.mark.parametrize("elements", [100, 20_000])
def test_values_that_the_processor_flushes_to_zero_are_counted(ops: Any, elements: int) -> None:
    tiny = torch.full((elements,), 2.0**-140)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal values")
    try:
        counts = counts_of(ops, tiny)
    finally:
        torch.set_flush_denormal(False)
    assert counts[ZERO] == 0
    assert counts[FIRST - 140 - EXPONENTS.start] == elements


@every_way
def test_blocks_are_summed(ops: Any) -> None:
    values = torch.ones((1 << 18) * 2 + 5)  # two whole blocks and a rest
    assert counts_of(ops, values)[FIRST - EXPONENTS.start] == len(values)


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_those_of_ml_dtypes(name: str) -> None:
    form, info = FORMATS[name], ml_dtypes.finfo(name)
    assert form.largest == float(info.max)
    assert form.mantissa_bits == info.nmant
    assert form.min_exponent == int(info.minexp)
    assert form.smallest_subnormal == float(info.smallest_subnormal)
    assert getattr(torch, name).itemsize * 8 == info.bits


@pytest.mark.parametrize("name", FORMATS)
def test_headroom(name: str) -> None:
    form = FORMATS[name]
    assert form.headroom(form.largest) == 0
    assert form.headroom(form.largest / 8) == 3
    assert form.headroom(0.0) is None
    assert form.headroom(1.5) == pytest.approx(math.log2(form.largest / 1.5), abs=1e-9)
    if name != "float64":
        assert form.headroom(form.largest * 4) == -2
        smallest = form.headroom(form.smallest_subnormal)
        assert smallest == pytest.approx(math.log2(form.largest) - form.subnormal_exponent)


@every_way
def test_the_bits_of_the_sign_are_where_they_are_looked_for(ops: Any) -> None:
    assert counts_of(ops, torch.full((10_000,), -1.0))[FIRST - EXPONENTS.start] == 10_000
