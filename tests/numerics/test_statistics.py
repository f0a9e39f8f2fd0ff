# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of a tensor are exactly what numpy finds, where they are counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cases.back_ends import REFERENCE, every_way
from numerics import oracle
from preamp.numerics import FORMATS, Measured, NumberFormat, TensorStatistics, measure
from preamp.numerics.statistics import add_up

HALVES = (FORMATS["float16"], FORMATS["bfloat16"])
scales = st.integers(-10, 24).map(lambda exponent: 2.0**exponent)


def statistics_of(
    tensor: torch.Tensor, form: NumberFormat, scale: float = 1.0, ops: Any = REFERENCE
) -> TensorStatistics:
    (tally,) = ops.tally([tensor])
    return Measured(tally, tensor.dtype).read(
        "w", "gradient", form, scale=scale, with_histogram=True
    )


def below(values: Any, bound: float) -> int:
    """How many values that are not zero are below ``bound``, without rounding anything."""
    return int(((values != 0) & (np.abs(values) < bound)).sum())


@every_way
@given(oracle.tensors(), st.sampled_from(HALVES), scales)
def test_counts_are_numpys(
    ops: Any, tensor: torch.Tensor, form: NumberFormat, scale: float
) -> None:
    values = oracle.exactly(tensor)
    finite = values[np.isfinite(values)]
    found = statistics_of(tensor, form, scale, ops=ops)
    assert found.elements == values.size
    assert found.zeros == int((values == 0).sum())
    assert found.nonfinite == values.size - finite.size
    assert found.below_subnormal == below(finite, form.smallest_subnormal)
    assert found.below_normal == below(finite, 2.0**form.min_exponent)
    assert found.unscaled_below_subnormal == below(finite, form.smallest_subnormal * scale)
    assert found.unscaled_below_normal == below(finite, 2.0**form.min_exponent * scale)
    assert found.max_abs == (float(np.abs(finite).max()) if finite.size else 0.0)
    assert found.headroom == form.headroom(found.max_abs)
    assert found.histogram is not None
    assert sum(found.histogram.values()) == finite.size - found.zeros
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    assert (found.what, found.form, found.scale) == ("gradient", form.name, scale)


@every_way
@given(oracle.tensors())
def test_rms_neither_overflows_nor_underflows(ops: Any, tensor: torch.Tensor) -> None:
    finite = oracle.exactly(tensor)
    finite = finite[np.isfinite(finite)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    found = statistics_of(tensor, HALVES[0], ops=ops).rms
    if largest == 0:
        assert found == 0
    else:
        wanted = largest * float(np.sqrt(np.mean((finite / largest) ** 2)))
        bits = 52 if tensor.dtype is torch.float64 else 23
        # A dozen roundings in the tensor's precision, and one step of subnormal numbers.
        assert math.isclose(found, wanted, rel_tol=2.0 ** (4 - bits), abs_tol=2.0**-149)


@every_way
@given(oracle.tensors())
def test_histogram_is_numpys(ops: Any, tensor: torch.Tensor) -> None:
    values = oracle.exactly(tensor)
    inside = oracle.exponents(values[np.isfinite(values) & (values != 0)])
    wanted = dict(zip(*np.unique(np.clip(inside, -149, 127), return_counts=True), strict=True))
    assert statistics_of(tensor, HALVES[0], ops=ops).histogram == wanted


@pytest.mark.parametrize("scale", [3.0, 1000.0])
def test_other_scales_count_to_the_power_of_two_below(scale: float) -> None:
    values = torch.tensor([2.0**e for e in range(-30, 10)])
    found = statistics_of(values, HALVES[0], scale)
    power = 2.0 ** math.floor(math.log2(scale))
    assert found.unscaled_below_normal == below(values.numpy(), power * 2.0**-14)


@every_way
@pytest.mark.parametrize("elements", [50, 20_000])
def test_rms_of_large_and_small_float32(ops: Any, elements: int) -> None:
    for value in (3e38, 1e-44, 2.0**-149):
        found = statistics_of(torch.full((elements,), value), HALVES[0], ops=ops)
        exact = float(torch.tensor(value))
        assert found.max_abs == exact
        assert math.isclose(found.rms, exact, rel_tol=1e-6)


@every_way
def test_what_is_not_finite_is_left_out_of_the_size(ops: Any) -> None:
    values = torch.tensor([math.inf, -math.inf, math.nan, 3.0, -4.0])
    found = statistics_of(values, HALVES[0], ops=ops)
    assert found.nonfinite == 3
    assert found.max_abs == 4.0
    assert math.isclose(found.rms, math.sqrt(12.5), rel_tol=1e-6)
    only = statistics_of(values[:3], HALVES[0], ops=ops)
    assert (only.max_abs, only.rms, only.headroom, only.histogram) == (0.0, 0.0, None, {})


def test_without_histogram() -> None:
    found = measure([torch.ones(3)])[0].read("w", "weight", HALVES[0], stalled=2)
    assert found.histogram is None
    assert found.stalled == 2


class Temporaries(TorchDispatchMode):
    """Notes the elements of what is made next to the tensor itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self.tensor, self.largest = tensor, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_new = isinstance(result, torch.Tensor) and (
            result.untyped_storage().data_ptr() != self.tensor.untyped_storage().data_ptr()
        )
        if is_new:
            self.largest = max(self.largest, result.numel())
        return result


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values,
    "transposed": lambda values: values.view(1 << 10, 1 << 10).t(),
    "channels last": lambda values: values.view(16, 64, 32, 32).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", oracle.DTYPES, ids=str)
def test_temporaries_do_not_grow_with_the_tensor(dtype: torch.dtype, layout: str) -> None:
    values = torch.ones(1 << 20, dtype=dtype)
    values[0] = math.nan
    values[1] = 0
    values = LAYOUTS[layout](values)
    with Temporaries(values) as temporaries:
        REFERENCE.tally([values])
    assert 0 < temporaries.largest <= 1 << 18


@every_way
@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(24.0).view(4, 6)[:, ::2],
        torch.arange(24.0).view(4, 6).t()[1:3],
        torch.arange(3.0).expand(4, 3),
        torch.arange(6.0).view(2, 1, 3).transpose(1, 2),
        torch.tensor(3.0),
        torch.empty(0, 4).t(),
    ],
    ids=str,
)
def test_it_does_not_matter_how_elements_lie(ops: Any, tensor: torch.Tensor) -> None:
    other = tensor.clone(memory_format=torch.contiguous_format)
    assert statistics_of(tensor, HALVES[0], ops=ops) == statistics_of(other, HALVES[0], ops=ops)


@given(st.lists(oracle.tensors(), min_size=1, max_size=5), st.sampled_from(HALVES), scales)
def test_parts_add_up_to_the_whole(
    tensors: list[torch.Tensor], form: NumberFormat, scale: float
) -> None:
    dtype = tensors[0].dtype
    parts = [tensor.to(dtype) for tensor in tensors]
    (found,) = add_up([statistics_of(part, form, scale) for part in parts])
    whole = statistics_of(torch.cat(parts), form, scale)
    assert replace(found, rms=0.0) == replace(whole, rms=0.0)
    assert found.rms == pytest.approx(whole.rms, rel=1e-6, nan_ok=True)
