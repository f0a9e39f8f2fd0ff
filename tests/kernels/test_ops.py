# SPDX-License-Identifier: BSD-3-Clause
"""Census, norms and linear combinations, against the reference and float64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.back_ends import defaults
from cases.rules import BF16, F16, F32, F64
from cases.selection import examples
from cases.tolerances import assert_same
from preamp.kernels import Census, backend
from preamp.kernels.by_device import ByDevice
from preamp.kernels.stored import join, split

REFERENCE = backend("reference")
DTYPES = (F16, BF16, F32, F64)
SIZES = (0, 1, 7, 1024, 1031, 8193)

# The fixture that is made once per test holds a back end, which has no state.
few = settings(
    max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
bad_values = st.sampled_from([math.inf, -math.inf, math.nan])
factors = st.sampled_from([1.0, 0.25, 3.0, 2.0**-16, 0.1])
dtypes = st.sampled_from(DTYPES)


@st.composite
def tensors(draw: Any, dtype: Any = dtypes, size: Any = None) -> torch.Tensor:
    """Finite values of every magnitude, in any layout that is or is not dense."""
    kind = draw(dtype) if isinstance(dtype, st.SearchStrategy) else dtype
    size = draw(st.sampled_from([0, 1, 5, 12, 1031])) if size is None else size
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    numbers = torch.randn(size, generator=generator, dtype=F64)
    numbers *= 10.0 ** (torch.rand(size, generator=generator, dtype=F64) * 40 - 30)
    largest = torch.finfo(kind).max
    data = numbers.clamp(-largest, largest).to(kind)
    layout = draw(st.sampled_from(["flat", "strided", "unaligned", "matrix", "transposed"]))
    if layout == "strided":
        return torch.stack([data, torch.full_like(data, math.nan)], dim=1)[:, 0]
    if layout == "unaligned":
        return torch.cat([data[:1], data])[1:] if size else data
    if layout in ("matrix", "transposed") and size == 12:
        return data.reshape(3, 4) if layout == "matrix" else data.reshape(3, 4).t()
    return data


def on(device: torch.device, found: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors on ``device``, in their layout; nan between strided ones stays nan."""
    if device.type == "cpu":
        return found
    return [
        torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)
        for t in found
    ]


def sparse(values: list[float], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rows = torch.tensor([[1, 1, 4][: len(values)]])
    data = torch.tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(rows, data, (6,), check_invariants=True).to(device)


# -- census and norms ------------------------------------------------------------------------


@few
@given(found=st.lists(tensors(), max_size=6), data=st.data())
def test_census_agrees_with_the_reference(
    ops: Any, device: torch.device, found: list[torch.Tensor], data: Any
) -> None:
    grads = on(device, found)
    spoilt = [g for g in grads if g.numel()]
    if spoilt and data.draw(st.booleans()):
        data.draw(st.sampled_from(spoilt))[-1] = data.draw(bad_values)
    before = [grad.clone() for grad in grads]
    ours, wanted = (back_end.census(grads, device) for back_end in (ops, REFERENCE))
    assert_same(ours.found_inf, wanted.found_inf)
    assert torch.equal(ours.max_abs.isnan(), wanted.max_abs.isnan())
    assert torch.equal(ours.max_abs.nan_to_num(), wanted.max_abs.nan_to_num())
    assert ours.norm is None
    for grad, was in zip(grads, before, strict=True):
        assert_same(grad, was)


@few
@given(found=st.lists(tensors(), min_size=1, max_size=5), with_norm=st.booleans(), data=st.data())
def test_the_largest_finite_values_come_along(
    triton_ops: Any, device: torch.device, found: list[torch.Tensor], with_norm: bool, data: Any
) -> None:
    """In the same pass, whatever else is in a tensor."""
    for tensor in found:
        places = st.lists(st.integers(0, max(tensor.numel() - 1, 0)), max_size=3)
        for place in data.draw(places) if tensor.numel() else []:
            tensor[torch.unravel_index(torch.tensor(place), tensor.shape)] = data.draw(bad_values)
    census = triton_ops.census(on(device, found), device, with_norm=with_norm)
    assert census.max_finite.dtype is F32
    for value, tensor in zip(census.max_finite.tolist(), found, strict=True):
        if not (tensor.ndim and all(tensor.stride()) and tensor.is_contiguous()):
            # What no kernel walks is not looked at for it.
            assert math.isnan(value) or value == largest_finite(tensor)
        else:
            assert value == largest_finite(tensor)
    assert census.max_abs.shape == census.max_finite.shape


def largest_finite(tensor: torch.Tensor) -> float:
    finite = tensor[tensor.isfinite()].abs()
    return float(finite.max().to(F32)) if finite.numel() else 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_finite_value_at_every_place_of_a_chunk(
    triton_ops: Any, device: torch.device, dtype: torch.dtype
) -> None:
    grads = [torch.ones(size, dtype=dtype, device=device) for size in SIZES]
    for grad in grads[1:]:
        grad[-1] = math.inf
    for which, place in ((2, 0), (4, 1029), (5, 0), (5, 1024), (5, 8191)):
        grads[which][place] = -3.0
        found = triton_ops.census(grads, device).max_finite.tolist()
        grads[which][place] = 1.0
        wanted = [float(size > 1) for size in SIZES]
        wanted[which] = 3.0
        assert found == wanted


def test_devices_that_do_not_know_the_largest_finite_values() -> None:
    """Of several devices' back ends one may know them."""

    class Knowing:
        def census(self, grads: Any, device: torch.device, **options: Any) -> Any:
            del grads, options
            some = torch.tensor([math.inf])
            return Census(torch.ones(()), max_abs=some, max_finite=torch.tensor([5.0]))

    class Ignorant:
        def census(self, grads: Any, device: torch.device, **options: Any) -> Any:
            return REFERENCE.census(grads, device, **options)

    here, there = torch.ones(1), torch.ones(1, device="meta")
    both: Any = ByDevice("test", lambda device: Knowing() if device.type == "meta" else Ignorant())  # type: ignore[arg-type, return-value]
    census = both.census([here, there], torch.device("cpu"))
    assert census.max_finite[0].isnan()
    assert census.max_finite[1] == 5.0
    assert census.max_abs.tolist() == [1.0, math.inf]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_census_at_every_place_of_a_chunk(
    ops: Any, device: torch.device, dtype: torch.dtype
) -> None:
    grads = [torch.ones(size, dtype=dtype, device=device) for size in SIZES]
    for value in (math.inf, math.nan):
        for which, place in ((1, 0), (4, 1030), (5, 0), (5, 1024), (5, 8191), (5, 8192)):
            grads[which][place] = value
            census = ops.census(grads, device, with_norm=True)
            grads[which][place] = 1.0
            assert_same(census.found_inf, torch.ones((), device=device))
            wanted = [float(size > 0) for size in SIZES]
            wanted[which] = value
            assert census.max_abs.tolist() == pytest.approx(wanted, nan_ok=True)
            assert math.isfinite(census.norm) is False
    census = ops.census(grads, device, with_norm=True)
    assert_same(census.found_inf, torch.zeros((), device=device))
    wanted = torch.tensor(sum(SIZES), dtype=F64).sqrt().to(device, F32)
    torch.testing.assert_close(census.norm, wanted, rtol=2.0**-22, atol=0.0)


def test_census_keeps_the_order_of_mixed_gradients(ops: Any, device: torch.device) -> None:
    """Several launches, and tensors that no kernel takes, end up in one result."""
    grads = [
        torch.tensor([3.0], dtype=F16, device=device),
        torch.tensor([-4.0], device=device),
        sparse([1.0, 5.0, -2.0], F32, device),
        torch.tensor([[7.0, math.nan]], device=device)[:, ::2],
        torch.tensor([8.0 - 6.0j], device=device),
        torch.tensor([1e300], dtype=F64, device=device),
        torch.tensor([9.0], dtype=F16, device=device),
    ]
    census = ops.census(grads, device, with_norm=True)
    wanted = [3.0, 4.0, 6.0, 7.0, 8.0, math.inf, 9.0]
    assert census.max_abs.tolist() == wanted
    assert census.found_inf.item() == 0.0  # 1e300 is finite, though not in float32
    wanted = [3.0, 4.0, math.hypot(6, 2), 7.0, 10.0, math.inf, 9.0]
    assert census.norm.item() == math.inf
    del grads[5], wanted[5]
    census = ops.census(grads, device, with_norm=True)
    assert census.norm.item() == pytest.approx(math.hypot(*wanted))
    assert ops.l2norms(grads, None, device).tolist() == pytest.approx(wanted)


def test_the_default_dtype_does_not_matter(ops: Any, device: torch.device) -> None:
    """Nor are norms in bfloat16 where models are."""
    grads = [torch.full((257,), 1.1, device=device), torch.ones(3, dtype=F16, device=device)]
    by = torch.tensor(2.0, device=device)

    def read() -> list[torch.Tensor]:
        census = ops.census(grads, device, with_norm=True)
        norms = ops.l2norms(grads, None, device), ops.l2norms(grads, by, device)
        total = ops.l2norm(grads, [None, by], device)
        return [census.found_inf, census.norm, census.max_abs, *norms, total]

    wanted = read()
    with defaults(BF16, "cpu"):
        found = read()
    for one, other in zip(found, wanted, strict=True):
        assert_same(one, other)


def test_census_of_nothing(ops: Any, device: torch.device) -> None:
    census = ops.census([], device, with_norm=True)
    assert_same(census.found_inf, torch.zeros((), device=device))
    assert census.max_abs.shape == (0,)
    assert census.norm == 0
    assert_same(ops.l2norm([], [], device), torch.zeros((), device=device))


def test_census_of_empty_tensors(ops: Any, device: torch.device) -> None:
    empty = [torch.zeros(shape, device=device) for shape in ((0,), (3, 0))]
    census = ops.census(empty, device, with_norm=True)
    assert census.found_inf.item() == 0.0
    assert census.max_abs.tolist() == [0.0, 0.0]
    assert census.norm == 0
    ops.scale_add_(empty, 2.0, [None, None])
    (wide,) = ops.widen_add([empty[1].half()], [torch.ones((), device=device)], [None])
    assert_same(wide, empty[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_overflow_are_not_overflows(
    ops: Any, device: torch.device, dtype: torch.dtype
) -> None:
    largest = torch.full((1100,), torch.finfo(dtype).max, dtype=dtype, device=device)
    assert ops.census([largest, -largest], device, with_norm=True).found_inf.item() == 0.0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_against_float64(ops: Any, device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    grads = [torch.randn(size, generator=generator).to(device, dtype) for size in SIZES]
    by = torch.tensor(2.0**-10, device=device)
    for factor in (None, by):
        exact = torch.stack([g.double().norm() * (1.0 if factor is None else by) for g in grads])
        norms = ops.l2norms(grads, factor, device)
        torch.testing.assert_close(norms.double(), exact, rtol=2.0**-20, atol=0.0)
        again = ops.l2norms([grad.clone() for grad in grads], factor, device)
        assert_same(again, norms)  # the order of the sums does not depend on the run
    mixed = [None, by, None, by, None, by]
    scaled = [1.0 if f is None else float(f) for f in mixed]
    total = math.hypot(*[float(g.double().norm()) * f for g, f in zip(grads, scaled, strict=True)])
    assert ops.l2norm(grads, mixed, device).item() == pytest.approx(total, rel=2.0**-20)
    assert ops.l2norm(grads, [None] * 6, device).dtype is F32


def test_the_factor_of_norms_comes_before_the_squares(ops: Any, device: torch.device) -> None:
    large = torch.full((100,), 1e25, device=device)
    assert torch.isinf(ops.l2norms([large], None, device)).all()
    norms = ops.l2norms([large], torch.tensor(1e-20, device=device), device)
    assert norms.item() == pytest.approx(1e6)


# -- linear combinations ---------------------------------------------------------------------


@few
@given(data=st.data(), by=factors, is_tensor=st.booleans())
def test_scaling_agrees_with_the_reference(
    ops: Any, device: torch.device, data: Any, by: float, is_tensor: bool
) -> None:
    grads = on(device, data.draw(st.lists(tensors(), min_size=1, max_size=5)))
    addends = [None if data.draw(st.booleans()) else torch.ones_like(grad) / 3 for grad in grads]
    factor = torch.tensor(by, device=device) if is_tensor else by
    ours, wanted = ([grad.clone() for grad in grads] for _ in range(2))
    ops.scale_add_(ours, factor, addends)
    REFERENCE.scale_add_(wanted, factor, addends)
    for one, other in zip(ours, wanted, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@few
@given(data=st.data(), a=factors, b=factors)
def test_axpby_agrees_with_the_reference(
    ops: Any, device: torch.device, data: Any, a: float, b: float
) -> None:
    size = data.draw(st.sampled_from([0, 1, 12, 1031]))
    x, y = on(device, [data.draw(tensors(size=size)) for _ in range(2)])
    y = y.reshape(x.shape)
    kinds = data.draw(st.lists(dtypes, min_size=1, max_size=3))
    ours, wanted = ([torch.zeros_like(x, dtype=kind) for kind in kinds] for _ in range(2))
    ys = [y if data.draw(st.booleans()) else None for _ in kinds]
    scale = torch.tensor(a, device=device)
    ops.axpby_(ours, scale, [x] * len(kinds), b, ys)
    REFERENCE.axpby_(wanted, scale, [x] * len(kinds), b, ys)
    for one, other in zip(ours, wanted, strict=True):
        assert torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_axpby_writes_onto_its_inputs(ops: Any, device: torch.device, dtype: torch.dtype) -> None:
    x, y = (torch.full((1031,), v, dtype=dtype, device=device) for v in (1.0, 4.0))
    ops.axpby_([x], 2.0, [x], 1.0, [y])
    ops.axpby_([y], 2.0, [x], 1.0, [y])
    assert x.unique().tolist() == [6.0]
    assert y.unique().tolist() == [16.0]


EVERY_HALF = torch.arange(-(2**15), 2**15, dtype=torch.int16)


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_rounding_is_torchs(ops: Any, device: torch.device, half: torch.dtype) -> None:
    """All half values, the midpoints above them, and their neighbours in float32."""
    every = EVERY_HALF.view(half).float()
    step = 2**12 if half is F16 else 2**15
    bits = every.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1, step - 1, step, step + 1])
    source = bits.reshape(-1).view(F32).to(device)
    target = torch.empty_like(source, dtype=half)
    ops.cast_copy_([source], [target])
    wanted = source.to(half)
    assert torch.equal(target.isnan(), wanted.isnan())
    assert torch.equal(target.nan_to_num(), wanted.nan_to_num())
    zeros = wanted == 0
    assert torch.equal(torch.signbit(target[zeros]), torch.signbit(wanted[zeros]))
    back = torch.empty_like(source)
    ops.cast_copy_([wanted], [back])
    assert torch.equal(back.nan_to_num(), wanted.float().nan_to_num())


@few
@given(data=st.data())
def test_casting_agrees_with_torch(ops: Any, device: torch.device, data: Any) -> None:
    sources = on(device, data.draw(st.lists(tensors(), min_size=1, max_size=4)))
    targets = [torch.zeros_like(source, dtype=data.draw(dtypes)) for source in sources]
    before = [source.clone() for source in sources]
    ops.cast_copy_(sources, targets)
    for source, target, was in zip(sources, targets, before, strict=True):
        assert_same(target, source.to(target.dtype))
        assert_same(source, was)


@few
@given(data=st.data())
def test_splitting_and_joining_are_as_defined(ops: Any, device: torch.device, data: Any) -> None:
    wides = on(device, data.draw(st.lists(tensors(dtype=F32), min_size=1, max_size=4)))
    specials = [math.nan, math.inf, -math.inf, -0.0, 65519.9, 65520.0, 1e-45, 1 + 2.0**-11]
    wides.append(torch.tensor(specials, device=device))
    kinds = [data.draw(st.sampled_from([F16, BF16])) for _ in wides]
    halves = [torch.zeros_like(w, dtype=kind) for w, kind in zip(wides, kinds, strict=True)]
    rounded = [torch.zeros_like(half) for half in halves]
    lows = [torch.zeros_like(half, dtype=torch.int16) for half in halves]
    backs = [torch.zeros_like(wide) for wide in wides]
    written = [t for t in (*halves, *rounded, *lows, *backs) if t.numel()]
    before = [t._version for t in written]
    unread = [wide._version for wide in wides]
    ops.split_(wides, halves, lows)
    ops.split_(wides, rounded, [None] * len(wides))
    ops.join_(halves, lows, backs)
    assert all(t._version > was for t, was in zip(written, before, strict=True))
    assert [wide._version for wide in wides] == unread
    for wide, half, alone, low, back in zip(wides, halves, rounded, lows, backs, strict=True):
        wanted_half, wanted_low = split(wide, half.dtype)
        assert_same(half, wanted_half)
        assert_same(alone, wanted_half)
        assert torch.equal(low, wanted_low)
        assert_same(back, join(wanted_half, wanted_low))


@few
@given(data=st.data())
def test_widening_agrees_with_the_reference(ops: Any, device: torch.device, data: Any) -> None:
    halves = on(device, data.draw(st.lists(tensors(st.sampled_from([F16, BF16])), max_size=5)))
    by = [torch.tensor(data.draw(factors), device=device) for _ in halves]
    bases = [torch.ones_like(h, dtype=F32) if data.draw(st.booleans()) else None for h in halves]
    copies = [None if base is None else base.clone() for base in bases]
    before = [half.clone() for half in halves]
    ours = ops.widen_add(halves, by, bases)
    wanted = REFERENCE.widen_add(halves, by, copies)
    for one, other, base, half in zip(ours, wanted, bases, halves, strict=True):
        assert_same(one, other)
        assert base is None or one is base
        assert base is not None or one.stride() == other.stride() or not half.numel()
    for half, was in zip(halves, before, strict=True):
        assert_same(half, was)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_sparse_gradients(ops: Any, device: torch.device, dtype: torch.dtype) -> None:
    grads = [sparse([1.0, 2.0, -4.0], dtype, device), torch.ones(2, dtype=dtype, device=device)]
    ops.scale_add_(grads, 0.5, [sparse([8.0], dtype, device), None])
    assert grads[0].is_sparse
    assert grads[0].to_dense().tolist() == [0, 9.5, 0, 0, -2.0, 0]
    assert grads[1].tolist() == [0.5, 0.5]
