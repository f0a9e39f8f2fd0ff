# SPDX-License-Identifier: BSD-3-Clause
"""Statistics and counts by exponent are what numpy finds in float64, for every dtype and layout."""

import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from cases.layouts import LAYOUTS
from preamp.kernels.plain.tally import ABOVE, BELOW, BINS, FIRST, NONFINITE, ZERO, tally
from preamp.numerics import EXPONENTS, FORMATS, Measured, NumberFormat, TensorStatistics, measure

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
MANY = 1 << 13

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
        few = few.repeat(MANY // len(few) + 1)
    return few


def exactly(tensor: torch.Tensor) -> Any:
    """The values as float64, by their bits: no processor flag can flush them."""
    wide = tensor.detach().reshape(-1).contiguous()
    if wide.dtype is torch.bfloat16:
        values = (wide.view(torch.int16).numpy().astype(np.int32) << 16).view(np.float32)
    else:
        values = wide.numpy()
    with np.errstate(invalid="ignore"):  # numpy tells of every signalling nan
        return values.astype(np.float64)


def exponents(finite: Any) -> Any:
    """``floor(log2(abs(x)))`` of values that are not zero."""
    return np.frexp(finite)[1] - 1


# -- statistics -------------------------------------------------------------------------------


HALVES = (FORMATS["float16"], FORMATS["bfloat16"])
scales = st.integers(-10, 24).map(lambda exponent: 2.0**exponent)


def statistics_of(tensor: torch.Tensor, form: NumberFormat, scale: float = 1.0) -> TensorStatistics:
    return Measured(tally(tensor), tensor.dtype).read(
        "w", "gradient", form, scale=scale, with_histogram=True
    )


def below(values: Any, bound: float) -> int:
    """How many values that are not zero are below ``bound``, without rounding anything."""
    return int(((values != 0) & (np.abs(values) < bound)).sum())


@given(tensors(), st.sampled_from(HALVES), scales)
@example(torch.tensor([1e-300, 1.0, 1e300], dtype=torch.float64), HALVES[0], 1.0)
def test_counts_are_numpys(tensor: torch.Tensor, form: NumberFormat, scale: float) -> None:
    values, before = exactly(tensor), tensor.clone()
    finite = values[np.isfinite(values)]
    found = statistics_of(tensor, form, scale)
    assert counts_of(tensor) == expected(tensor)
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))
    assert found.elements == values.size
    assert found.zeros == int((values == 0).sum())
    assert found.nonfinite == values.size - finite.size
    assert found.below_subnormal == below(finite, form.smallest_subnormal)
    assert found.below_normal == below(finite, 2.0**form.min_exponent)
    assert found.unscaled_below_subnormal == below(finite, form.smallest_subnormal * scale)
    assert found.unscaled_below_normal == below(finite, 2.0**form.min_exponent * scale)
    assert found.max_abs == (float(np.abs(finite).max()) if finite.size else 0.0)
    assert found.headroom == form.headroom(found.max_abs)
    places = np.clip(exponents(finite[finite != 0]), -149, 127)
    assert found.histogram == dict(zip(*np.unique(places, return_counts=True), strict=True))
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    assert (found.what, found.form, found.scale) == ("gradient", form.name, scale)


@given(tensors())
def test_rms_neither_overflows_nor_underflows(tensor: torch.Tensor) -> None:
    finite = exactly(tensor)
    finite = finite[np.isfinite(finite)]
    largest = float(np.abs(finite).max()) if finite.size else 0.0
    found = statistics_of(tensor, HALVES[0]).rms
    if largest == 0:
        assert found == 0
    else:
        wanted = largest * float(np.sqrt(np.mean((finite / largest) ** 2)))
        bits = 52 if tensor.dtype is torch.float64 else 23
        # A dozen roundings in the tensor's precision, and one step of subnormal numbers.
        assert math.isclose(found, wanted, rel_tol=2.0 ** (4 - bits), abs_tol=2.0**-149)


@pytest.mark.parametrize("scale", [3.0, 1000.0])
def test_other_scales_count_to_the_power_of_two_below(scale: float) -> None:
    values = torch.tensor([2.0**e for e in range(-30, 10)])
    found = statistics_of(values, HALVES[0], scale)
    power = 2.0 ** math.floor(math.log2(scale))
    assert found.unscaled_below_normal == below(values.numpy(), power * 2.0**-14)


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


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contiguous": lambda values: values,
    "transposed": lambda values: values.view(1 << 10, 1 << 10).t(),
    "channels last": lambda values: values.view(16, 64, 32, 32).permute(0, 3, 1, 2),
}


@pytest.mark.parametrize("layout", VIEWS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_temporaries_do_not_grow_with_the_tensor(dtype: torch.dtype, layout: str) -> None:
    values = torch.ones(1 << 20, dtype=dtype)
    values[0] = math.nan
    values[1] = 0
    values = VIEWS[layout](values)
    with Temporaries(values) as temporaries:
        tally(values)
    assert 0 < temporaries.largest <= 1 << 18


# -- counts by exponent -----------------------------------------------------------------------


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def counts_of(tensor: torch.Tensor) -> list[int]:
    return tally(tensor).counts.tolist()


def expected(tensor: torch.Tensor) -> list[int]:
    values = exactly(tensor)
    counts = [0] * BINS
    counts[ZERO] = int((values == 0).sum())
    counts[NONFINITE] = int((~np.isfinite(values)).sum())
    for exponent in exponents(values[np.isfinite(values) & (values != 0)]):
        place = FIRST + int(exponent) - EXPONENTS.start
        counts[min(max(place, BELOW), ABOVE)] += 1
    return counts


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("times", [1, 16])
def test_every_half_value_is_counted_right(dtype: torch.dtype, times: int) -> None:
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    for part in every.split(len(every) if times > 1 else 4096):  # both ways to count
        assert counts_of(part) == expected(part)


@every_dtype
def test_every_exponent_is_counted_right(dtype: torch.dtype) -> None:
    powers = 2.0 ** torch.arange(-160, 140, dtype=torch.float64)
    values = torch.cat([powers, -powers * 1.75, powers * (2 - 2.0**-8)]).to(dtype)
    assert counts_of(values) == expected(values)
    many = values.repeat(12)
    assert len(many) > MANY
    assert counts_of(many) == expected(many)


@every_dtype
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("shape", [(3, 2, 5, 4), (8, 4, 20, 30)], ids=str)
def test_layouts(layout: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    made = torch.Generator().manual_seed(0)
    wide = torch.randn(shape, generator=made) * torch.rand(shape, generator=made) ** 30
    values = wide.to(dtype)
    assert counts_of(layout(values)) == expected(values)


@pytest.mark.parametrize("elements", [100, 20_000])
def test_values_that_the_processor_flushes_to_zero_are_counted(elements: int) -> None:
    tiny = torch.full((elements,), 2.0**-140)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal values")
    try:
        counts = counts_of(tiny)
    finally:
        torch.set_flush_denormal(False)
    assert counts[ZERO] == 0
    assert counts[FIRST - 140 - EXPONENTS.start] == elements


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
