# SPDX-License-Identifier: BSD-3-Clause
"""The reference back end, op by op, against float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from cases.tolerances import assert_same
from preamp.core.errors import PreampUnavailableError
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


def spoil(tensor: torch.Tensor, place: int, value: float) -> None:
    """Write ``value`` to element ``place`` of a tensor of any layout."""
    index = torch.unravel_index(torch.tensor(place), tensor.shape) if tensor.dim() else ()
    tensor[tuple(index)] = value


def spacing(wanted: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One ulp of ``dtype`` at each value of a float64 tensor, subnormals included."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(wanted.abs().clamp(min=info.tiny)).exponent.double()
    return torch.exp2(exponent - BITS[dtype])


# -- the table -------------------------------------------------------------------------------


def test_an_unknown_back_end_is_refused() -> None:
    with pytest.raises(PreampUnavailableError, match=r"^backend='cudnn' is not known\. Choose"):
        backend("cudnn")


# -- census ----------------------------------------------------------------------------------


def expected_max(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.detach().double().reshape(-1)
    largest = wide.abs().max() if wide.numel() else torch.zeros(())
    return largest.to(torch.float32)


@given(st.lists(tensors(), max_size=4))
def test_census_of_finite_gradients(grads: list[torch.Tensor]) -> None:
    before = [grad.clone() for grad in grads]
    census = OPS.census(grads, CPU)
    assert_same(census.found_inf, scalar(0.0))
    assert census.max_abs.shape == (len(grads),)
    for found, grad in zip(census.max_abs, grads, strict=True):
        assert_same(found, expected_max(grad))
    for grad, was in zip(grads, before, strict=True):
        assert_same(grad, was)


@given(st.lists(tensors(), min_size=1, max_size=4), bad_values, st.data())
def test_census_finds_one_bad_value_anywhere(
    grads: list[torch.Tensor], value: float, data: Any
) -> None:
    which = data.draw(st.integers(0, len(grads) - 1))
    assume(grads[which].numel() > 0)
    spoil(grads[which], data.draw(st.integers(0, grads[which].numel() - 1)), value)
    census = OPS.census(grads, CPU)
    assert_same(census.found_inf, scalar(1.0))
    for index, (found, grad) in enumerate(zip(census.max_abs, grads, strict=True)):
        if index == which:
            assert not torch.isfinite(found)
        else:
            assert_same(found, expected_max(grad))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_that_overflow_are_not_overflows(dtype: torch.dtype, sign: int) -> None:
    """A-26: a sum of finite values tells nothing; neither do squares."""
    largest = sign * torch.full((1000,), LARGEST[dtype], dtype=dtype)
    census = OPS.census([largest, largest], CPU)
    assert_same(census.found_inf, scalar(0.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_that_cancel_are_found(dtype: torch.dtype) -> None:
    assert OPS.census([torch.tensor([math.inf, -math.inf], dtype=dtype)], CPU).found_inf == 1


def sparse(values: list[float], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A sparse vector whose first two values belong to the same row."""
    rows = torch.tensor([[1, 1, 4][: len(values)]])
    data = torch.tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(rows, data, (6,), check_invariants=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_census_of_sparse_gradients(dtype: torch.dtype) -> None:
    census = OPS.census([sparse([1.0, 2.0, -4.0], dtype), sparse([], dtype)], CPU)
    assert census.found_inf == 0
    assert census.max_abs.tolist() == [4.0, 0.0]
    assert OPS.census([sparse([1.0, 2.0, math.nan], dtype)], CPU).found_inf == 1
    largest = LARGEST[dtype]
    assert OPS.census([sparse([largest, largest], dtype)], CPU).found_inf == 1  # one row, summed


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


def test_scaling_several_at_once() -> None:
    grads = [torch.full((2,), 4.0, dtype=dtype) for dtype in DTYPES]
    OPS.scale_add_(grads, scalar(0.25), [None, torch.ones(2, dtype=torch.bfloat16), None, None])
    assert [grad.tolist() for grad in grads] == [[1.0] * 2, [2.0] * 2, [1.0] * 2, [1.0] * 2]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("addend", [False, True])
def test_scaling_sparse_gradients(dtype: torch.dtype, addend: bool) -> None:
    grad = sparse([1.0, 2.0, -4.0], dtype)
    before = grad
    OPS.scale_add_([grad], scalar(0.5), [sparse([8.0], dtype) if addend else None])
    assert grad is before
    assert grad.is_sparse
    wanted = torch.tensor([0, 9.5 if addend else 1.5, 0, 0, -2.0, 0], dtype=dtype)
    assert_same(grad.to_dense(), wanted)


# -- widen_add -------------------------------------------------------------------------------


@given(tensors(dtype=halves), scales)
def test_widening_is_exact(half: torch.Tensor, factor: float) -> None:
    before = half.clone()
    (wide,) = OPS.widen_add([half], [scalar(factor)], [None])
    assert_same(wide, (half.double() * factor).to(torch.float32))
    assert_same(half, before)
    assert wide.shape == half.shape
    if wide.numel():
        wide.fill_(3.0)  # memory of its own
        assert_same(half, before)


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


def test_widening_takes_one_factor_each() -> None:
    ones = [torch.ones(1, dtype=dtype) for dtype in HALVES]
    wide = OPS.widen_add(ones, [scalar(2.0), scalar(3.0)], [None, torch.ones(1)])
    assert [w.item() for w in wide] == [2.0, 4.0]


def test_widening_keeps_the_layout() -> None:
    half = torch.zeros(2, 3, 4, 4, dtype=torch.float16).to(memory_format=torch.channels_last)
    (wide,) = OPS.widen_add([half], [scalar(1.0)], [None])
    assert wide.stride() == half.stride()


# -- cast_copy_ ------------------------------------------------------------------------------


@given(tensors(dtype=st.just(torch.float32)), halves)
def test_casting_rounds_to_nearest(source: torch.Tensor, dtype: torch.dtype) -> None:
    target = torch.full(source.shape, math.nan, dtype=dtype)
    before = source.clone()
    OPS.cast_copy_([source], [target])
    rounded_once(source.double(), target)
    assert_same(source, before)


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


@pytest.mark.parametrize("dtype", DTYPES)
def test_axpby_writes_onto_its_inputs(dtype: torch.dtype) -> None:
    x, y = torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([4.0, 8.0], dtype=dtype)
    OPS.axpby_([x], 2.0, [x], 1.0, [y])
    assert x.tolist() == [6.0, 12.0]
    OPS.axpby_([y], 2.0, [x], 1.0, [y])
    assert y.tolist() == [16.0, 32.0]


# -- l2norms ---------------------------------------------------------------------------------


@given(st.lists(tensors(), min_size=1, max_size=4), st.sampled_from([None, 2.0**-16, 3.0]))
def test_norms_of_each_tensor(grads: list[torch.Tensor], factor: float | None) -> None:
    by = factor or 1.0
    wanted = torch.stack([(grad.double() * by).square().sum().sqrt() for grad in grads])
    assume(all(g.numel() == 0 or (g.abs().double() * by).max() < 1e18 for g in grads))
    norms = OPS.l2norms(grads, None if factor is None else scalar(factor), CPU)
    assert norms.dtype is torch.float32
    assert norms.shape == (len(grads),)
    # Squares below float32's range vanish: nothing under 1e-22 can count.
    torch.testing.assert_close(norms.double(), wanted, rtol=2.0**-20, atol=1e-21)


def test_the_factor_of_norms_comes_before_the_squares() -> None:
    large = torch.full((100,), 1e25)
    assert torch.isinf(OPS.l2norms([large], None, CPU)).all()
    norms = OPS.l2norms([large, sparse([3.0, 1.0, 3.0])], scalar(1e-20), CPU)
    assert norms[0].item() == pytest.approx(1e6)


def test_norms_of_nothing() -> None:
    assert_same(OPS.l2norms([], None, CPU), torch.zeros(0))
    assert_same(OPS.l2norms([torch.ones(0), torch.ones(1)], None, CPU), torch.tensor([0.0, 1.0]))
    assert OPS.l2norms([sparse([3.0, 1.0, 3.0])], None, CPU).tolist() == [5.0]


# -- l2norm ----------------------------------------------------------------------------------


@given(st.lists(tensors(dtype=halves), max_size=4), st.data())
def test_the_norm_of_half_gradients(grads: list[torch.Tensor], data: Any) -> None:
    factors = [data.draw(st.sampled_from([None, 2.0**-16, 0.5, 3.0])) for _ in grads]
    wanted = math.sqrt(
        sum(
            float((grad.double() * (factor or 1.0)).square().sum())
            for grad, factor in zip(grads, factors, strict=True)
        )
    )
    assume(wanted == 0 or 1e-15 < wanted < 1e15)
    assume(all(g.numel() == 0 or g.abs().double().max() < 1e18 for g in grads))
    norm = OPS.l2norm(grads, [None if f is None else scalar(f) for f in factors], CPU)
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(wanted, rel=2.0**-20, abs=1e-18)


def test_float16_values_cannot_overflow_the_norm() -> None:
    largest = torch.full((10000,), 65504.0, dtype=torch.float16)
    assert OPS.l2norm([largest], [None], CPU).item() == pytest.approx(6550400.0, rel=1e-6)


def test_norms_per_dtype() -> None:
    grads = [torch.tensor([3.0, 4.0], dtype=dtype) for dtype in DTYPES]
    factors = [scalar(2.0), None, None, None]
    wanted = math.sqrt(100 + 3 * 25)
    assert OPS.l2norm(grads, factors, CPU).item() == pytest.approx(wanted, rel=1e-6)
    assert OPS.l2norm([sparse([3.0, 1.0, 3.0])], [None], CPU).item() == 5.0
    assert_same(OPS.l2norm([], [], CPU), scalar(0.0))
    assert_same(OPS.l2norm([torch.ones(0)], [None], CPU), scalar(0.0))


@given(bad_values, dtypes)
def test_a_bad_value_spoils_the_norm(value: float, dtype: torch.dtype) -> None:
    norm = OPS.l2norm([torch.ones(3), torch.tensor([value], dtype=dtype)], [None, None], CPU)
    assert not torch.isfinite(norm)
