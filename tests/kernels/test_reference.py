# SPDX-License-Identifier: BSD-3-Clause
"""The reference back end, op by op, against float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cases.tolerances import assert_same
from preamp.kernels import backend

OPS = backend("reference")
CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
DTYPES = (*HALVES, torch.float32, torch.float64)
LARGEST = {dtype: torch.finfo(dtype).max for dtype in DTYPES}
BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}

dtypes = st.sampled_from(DTYPES)
halves = st.sampled_from(HALVES)
shapes = st.sampled_from([(), (0,), (1,), (5,), (2, 3), (3, 0, 2), (2, 2, 2)])
bad_values = st.sampled_from([math.inf, -math.inf, math.nan])


@st.composite
def magnitudes(draw: Any) -> float:
    """Zero, or anything from float32's smallest subnormal to its largest value."""
    value = 10.0 ** draw(st.floats(-45, 38.5))
    return draw(st.sampled_from([0.0, value, -value]))


@st.composite
def tensors(draw: Any, dtype: Any = dtypes, shape: Any = shapes) -> torch.Tensor:
    """A finite tensor of any layout that a gradient may have."""
    kind, size = draw(dtype), draw(shape)
    count = math.prod(size)
    numbers = draw(st.lists(magnitudes(), min_size=count, max_size=count))
    largest = LARGEST[kind]
    data = torch.tensor(numbers, dtype=torch.float64).clamp(-largest, largest).to(kind)
    data = data.reshape(size)
    assert torch.isfinite(data).all()
    if data.dim() >= 2 and draw(st.booleans()):
        data = data.transpose(0, 1).contiguous().transpose(0, 1)
    if data.dim() >= 1 and draw(st.booleans()):
        padded = torch.full((*size[:-1], 2 * size[-1]), math.nan, dtype=kind)
        padded[..., ::2] = data  # every other element is somebody else's
        data = padded[..., ::2]
    return data


scales = st.integers(-24, 24).map(lambda n: 2.0**n)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float32)


def spacing(wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One ulp of ``dtype`` at each value of a float64 tensor, subnormals included."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(wanted.abs().clamp(min=info.tiny)).exponent.double()
    return torch.exp2(exponent - BITS[dtype])


# -- scale_add_ ------------------------------------------------------------------------------


def rounded_once(wanted: torch.Tensor, got: torch.Tensor, slack: int = 0) -> None:
    """``got`` is ``wanted`` (float64) rounded to nearest, give or take ``slack`` more ulps."""
    dtype = got.dtype
    finite = torch.isfinite(got)
    assert (wanted.abs()[~finite] >= LARGEST[dtype] * (1 - 2.0 ** -BITS[dtype])).all()
    error = (got.double() - wanted).abs()[finite]
    assert (error <= spacing(wanted, dtype)[finite] * (0.5 + slack)).all()


@given(tensors(), scales, st.booleans())
def test_scaling_rounds_once(grad: torch.Tensor, factor: float, as_tensor: bool) -> None:
    wanted = grad.double() * factor
    before = grad
    OPS.scale_add_([grad], scalar(factor) if as_tensor else factor, [None])
    assert grad is before
    # Through float32 a half value is scaled exactly, unless float32 itself runs out of range.
    rounded_once(wanted, grad, slack=int(grad.dtype in HALVES))


@given(tensors(dtype=st.sampled_from([torch.float16, torch.float32])), st.integers(0, 24))
def test_unscaling_what_was_scaled_is_exact(grad: torch.Tensor, power: int) -> None:
    scaled = (grad.double() * 2.0**power).to(grad.dtype)
    assume(bool(torch.isfinite(scaled).all()))
    assume(bool((scaled.double() == grad.double() * 2.0**power).all()))
    OPS.scale_add_([scaled], scalar(2.0**-power), [None])
    assert torch.equal(scaled, grad)


@given(st.data(), dtypes, shapes, scales)
def test_adding_is_done_in_the_math_dtype(
    data: Any, dtype: torch.dtype, shape: tuple[int, ...], factor: float
) -> None:
    grad = data.draw(tensors(st.just(dtype), st.just(shape)))
    addend = data.draw(tensors(st.just(dtype), st.just(shape)))
    math_dtype = torch.float64 if dtype is torch.float64 else torch.float32
    wanted = (grad.to(math_dtype) * factor + addend.to(math_dtype)).to(dtype)
    kept = addend.clone()
    OPS.scale_add_([grad], scalar(factor), [addend])
    assert torch.equal(grad.nan_to_num(7.0), wanted.nan_to_num(7.0))
    assert_same(addend, kept)


def test_half_sums_are_rounded_once() -> None:
    """1.5 + 1 smallest steps: rounding the product to 2 first would make it 3."""
    step = 2.0**-24
    grad = torch.tensor([3 * step], dtype=torch.float16)
    OPS.scale_add_([grad], scalar(0.5), [torch.tensor([step], dtype=torch.float16)])
    assert_same(grad, torch.tensor([2 * step], dtype=torch.float16))


@given(bad_values, dtypes)
def test_bad_values_stay_bad(value: float, dtype: torch.dtype) -> None:
    grad = torch.tensor([1.0, value], dtype=dtype)
    OPS.scale_add_([grad], scalar(2.0**-16), [torch.ones(2, dtype=dtype)])
    assert torch.isfinite(grad).tolist() == [True, False]


# -- widen_add -------------------------------------------------------------------------------


@given(st.data(), halves, shapes, scales)
def test_widening_onto_an_accumulator(
    data: Any, dtype: torch.dtype, shape: tuple[int, ...], factor: float
) -> None:
    half = data.draw(tensors(st.just(dtype), st.just(shape)))
    base = data.draw(tensors(st.just(torch.float32), st.just(shape)))
    wanted = base + half.float() * factor
    (wide,) = OPS.widen_add([half], [scalar(factor)], [base])
    assert wide is base
    assert torch.equal(wide.nan_to_num(7.0), wanted.nan_to_num(7.0))


# -- cast_copy_ ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "value", "wanted"),
    [
        (torch.float16, 1 + 2.0**-11, 1.0),  # ties go to even
        (torch.float16, 1 + 3 * 2.0**-11, 1 + 2.0**-9),
        (torch.float16, 65519.0, 65504.0),
        (torch.float16, 65520.0, math.inf),
        (torch.float16, 2.0**-25, 0.0),
        (torch.float16, 2.0**-25 * 1.5, 2.0**-24),
        (torch.bfloat16, 1 + 2.0**-8, 1.0),
        (torch.bfloat16, 1 + 3 * 2.0**-8, 1 + 2.0**-6),
        (torch.bfloat16, 3.4e38, math.inf),
        (torch.bfloat16, -math.inf, -math.inf),
    ],
)
def test_casting_at_the_edges(dtype: torch.dtype, value: float, wanted: float) -> None:
    target = torch.empty(1, dtype=dtype)
    OPS.cast_copy_([torch.tensor([value])], [target])
    assert target.item() == wanted


# -- axpby_ ----------------------------------------------------------------------------------

numbers = st.sampled_from([0.0, 1.0, -0.5, 2.0**-16, 3.0, 0.1])


@given(st.data(), shapes, dtypes, numbers, numbers)
def test_axpby_rounds_once_on_store(
    data: Any, shape: tuple[int, ...], stored: torch.dtype, a: float, b: float
) -> None:
    x = data.draw(tensors(dtypes, st.just(shape)))
    y = data.draw(st.none() | tensors(dtypes, st.just(shape)))
    before = [None if t is None else t.clone() for t in (x, y)]
    target = torch.full(shape, math.nan, dtype=stored)
    OPS.axpby_([target], a, [x], b, [y])
    products = [t.double() * f for t, f in ((x, a), (y, b)) if t is not None]
    exact = torch.stack(products).sum(dim=0)
    sizes = torch.stack(products).abs().sum(dim=0)
    is_narrow = any(t is not None and t.dtype is not torch.float64 for t in (x, y))
    assume(not is_narrow or bool((sizes < 1e38).all()))
    # The factor, the products and their sum are each rounded.
    in_between = 2 * spacing(sizes, torch.float32 if is_narrow else torch.float64)
    fits = exact.abs() < LARGEST[stored] * 0.99
    error = (target.double() - exact).abs()
    assert (error <= spacing(exact, stored) / 2 + in_between)[fits].all()
    for tensor, was in zip((x, y), before, strict=True):
        assert tensor is None or torch.equal(tensor, was)


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_axpby_is_exact_where_float32_is(dtype: torch.dtype, stored: torch.dtype) -> None:
    x = torch.tensor([1.0, -2.0, 0.75], dtype=dtype)
    y = torch.tensor([4.0, 0.0, 1.0], dtype=torch.bfloat16)
    target = torch.empty(3, dtype=stored)
    OPS.axpby_([target], scalar(0.5), [x], -2.0, [y])
    assert_same(target, torch.tensor([-7.5, -1.0, -1.625], dtype=stored))
    OPS.axpby_([target], scalar(4.0), [x], 0.0, [None])
    assert_same(target, torch.tensor([4.0, -8.0, 3.0], dtype=stored))


# -- l2norm ----------------------------------------------------------------------------------
