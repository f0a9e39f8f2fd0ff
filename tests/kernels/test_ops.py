# SPDX-License-Identifier: BSD-3-Clause
"""Scaling, casting, census and norms of every back end, against what they are defined as.

What only one result can be right for is compared bitwise; norms are within the ulps that the op
table states.
"""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases.back_ends import REFERENCE, as_they_are, defaults, here
from cases.exact import Exact, assert_within_ulps
from cases.layouts import LAYOUTS
from cases.rules import BF16, F16, F32, F64
from cases.tolerances import assert_same
from preamp.core.dtypes import math_dtype
from preamp.kernels.plain.lists import TOGETHER, runs
from preamp.kernels.stored import split

# What a dtype takes is written anew in each back end.
pytestmark = pytest.mark.product

CPU = torch.device("cpu")
DTYPES = (F16, BF16, F32, F64)
ULPS = 4
EDGES = tuple(block + by for block in (1 << 16, 1 << 18) for by in (-1, 0, 1))
"""Sizes around those of blocks, and of runs."""

SHAPES = ((5, 3, 4, 2), (33, 31), (), (7,), (0,), (3, 0, 2), (1,))
CHUNKS = (1, 7, 1024, 1031, 8193)
"""Sizes around those of Triton's programs, and their vectors."""

BAD = (math.inf, -math.inf, math.nan)

Tensors = list[torch.Tensor]


def values(seed: int, shape: Any, dtype: torch.dtype, spread: float = 8.0) -> torch.Tensor:
    """Both signs, many magnitudes, some zeros, all finite."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, generator=generator, dtype=F64)
    data *= 10.0 ** (spread * (torch.rand(shape, generator=generator, dtype=F64) - 0.5))
    data[data.abs() < 10.0 ** (-spread / 2)] = 0.0
    largest = torch.finfo(dtype).max
    return data.clamp(-largest, largest).to(dtype)


def every_kind() -> Tensors:
    """Of each dtype in each layout; shapes take turns."""
    kinds = enumerate(itertools.product(SHAPES[:2], DTYPES, LAYOUTS))
    found = [layout(values(n, shape, dtype)) for n, (shape, dtype, layout) in kinds]
    found += [
        values(n, shape, dtype)
        for n, (shape, dtype) in enumerate(zip(SHAPES, 2 * DTYPES, strict=False))
    ]
    return found


def sparse(numbers: list[float], dtype: torch.dtype = F32) -> torch.Tensor:
    """A sparse vector whose first two values belong to the same row."""
    rows = torch.tensor([[1, 1, 4][: len(numbers)]])
    data = torch.tensor(numbers, dtype=dtype)
    return torch.sparse_coo_tensor(rows, data, (6,), check_invariants=True)


def clones(column: Sequence[Any]) -> list[Any]:
    return [None if tensor is None else tensor.clone() for tensor in column]


def assert_all_same(ours: Sequence[Any], wanted: Sequence[Any]) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert_same(one, other)


# -- sums ------------------------------------------------------------------------------------------


def defined(dtype: torch.dtype, *terms: tuple[torch.Tensor | None, float]) -> torch.Tensor:
    """A sum of products: each rounded in its own precision, their sum in the larger, then once."""
    products = [t.to(math_dtype(t.dtype)) * by for t, by in terms if t is not None]
    return sum(products[1:], products[0]).to(dtype)


def check_sums(ops: Any, xs: Tensors, ys: list[Any], targets: Tensors, a: Any, b: Any) -> None:
    """All ops that write, of lists that fit; what they read stays as it is."""
    count, by = len(xs), (float(a), float(b))
    kept = clones(xs), clones(ys)
    sums, alone, cast, scaled = *map(clones, (targets, targets, targets)), clones(xs)
    addends = [None if y is None else y.to(x.dtype) for x, y in zip(xs, ys, strict=True)]
    ops.axpby_(sums, a, xs, b, ys)
    ops.axpby_(alone, a, xs, b, [None] * count)
    ops.cast_copy_(xs, cast)
    ops.scale_add_(scaled, b, addends)
    for place, (x, y, addend, out) in enumerate(zip(*kept, addends, targets, strict=True)):
        assert_same(sums[place], defined(out.dtype, (x, by[0]), (y, by[1])), f"axpby {place}")
        assert_same(alone[place], defined(out.dtype, (x, by[0])), f"alone {place}")
        assert_same(cast[place], x.to(out.dtype), f"cast {place}")
        assert_same(scaled[place], defined(x.dtype, (x, by[1]), (addend, 1.0)), f"scale {place}")
    halves = [x.to((F16, BF16)[place % 2]) for place, x in enumerate(xs)]
    accumulators = [None if y is None else y.to(F32, copy=True) for y in ys]
    before = clones(accumulators)
    wide = ops.widen_add(halves, [torch.tensor(by[0])] * count, accumulators)
    for got, half, given_, was in zip(wide, halves, accumulators, before, strict=True):
        assert_same(got, defined(F32, (half, by[0]), (was, 1.0)), "widen")
        assert got is given_ or (given_ is None and got.stride() == half.stride())
        assert got.data_ptr() != half.data_ptr() or not got.numel()
    assert_all_same(xs, kept[0])
    assert_all_same(ys, kept[1])


@pytest.mark.parametrize(("a", "b"), [(0.1, 3.0), (-0.7, 0.1), (2.0**-16, 1.0)])
@pytest.mark.parametrize("as_tensors", [False, True])
def test_sums_of_every_dtype_and_layout(ops: Any, a: float, b: float, as_tensors: bool) -> None:
    """No product is fused with a sum."""
    xs = every_kind()
    kinds = [None, *DTYPES]
    ys = [None if k is None else values(99, x.shape, k) for x, k in zip(xs, itertools.cycle(kinds))]
    targets = [torch.zeros(x.shape, dtype=DTYPES[n % 3]) for n, x in enumerate(xs)]
    xs[0].view(-1)[:4] = torch.tensor([math.nan, -math.inf, math.inf, -0.0])
    if as_tensors:
        check_sums(ops, xs, ys, targets, torch.tensor([a]), torch.tensor(b))
    else:
        check_sums(ops, xs, ys, targets, torch.tensor(a).item(), torch.tensor(b).item())


@pytest.mark.parametrize("stored", DTYPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_float32_has(ops: Any, dtype: torch.dtype, stored: torch.dtype) -> None:
    """Onto their own inputs too, and by a number beside a tensor."""
    x = torch.tensor([1.0, -2.0, 0.75], dtype=dtype)
    y = torch.tensor([4.0, 0.0, 1.0], dtype=BF16)
    target = torch.empty(3, dtype=stored)
    ops.axpby_([target], torch.tensor(0.5), [x], -2.0, [y])
    assert_same(target, torch.tensor([-7.5, -1.0, -1.625], dtype=stored))
    ops.axpby_([target], torch.tensor(4.0), [x], 0.0, [None])
    assert_same(target, torch.tensor([4.0, -8.0, 3.0], dtype=stored))
    ops.axpby_([x], 2.0, [x], 1.0, [target])
    assert x.tolist() == [6.0, -12.0, 4.5]
    ops.axpby_([target], torch.tensor(2.0), [x], torch.tensor(1.0), [target])
    assert target.tolist() == [16.0, -32.0, 12.0]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_sparse_and_complex_gradients(ops: Any, dtype: torch.dtype) -> None:
    grads = [torch.ones(2, dtype=dtype), sparse([1.0, 2.0, -4.0], dtype), sparse([1.0], dtype)]
    grads.append(torch.tensor([2 + 4j]))
    before = list(grads)
    ops.scale_add_(grads, torch.tensor(0.5), [None, sparse([8.0], dtype), None, None])
    assert all(grad is old for grad, old in zip(grads, before, strict=True))
    assert_same(grads[1].to_dense(), torch.tensor([0, 9.5, 0, 0, -2.0, 0], dtype=dtype))
    assert_same(grads[2].to_dense(), torch.tensor([0, 0.5, 0, 0, 0, 0], dtype=dtype))
    assert [grads[0].tolist(), grads[3].tolist()] == [[0.5, 0.5], [1 + 2j]]


def test_halves_are_split_and_joined_as_defined(ops: Any) -> None:
    wides = [x.float() for x in every_kind()]
    wides[0].view(-1)[:4] = torch.tensor([math.nan, -math.inf, 65519.9, 65520.0])
    halves = [torch.zeros(x.shape, dtype=(F16, BF16)[n % 2]) for n, x in enumerate(wides)]
    alone, lows, again = clones(halves), [half.short() for half in halves], clones(wides)
    written = [t for t in (*halves, *lows, *again) if t.numel()]
    before = [t._version for t in written]
    ops.split_(wides, halves, lows)
    ops.split_(wides, alone, [None] * len(wides))
    ops.join_(halves, lows, again)
    assert all(t._version > was for t, was in zip(written, before, strict=True))
    parts = [split(wide, half.dtype) for wide, half in zip(wides, halves, strict=True)]
    assert_all_same(halves, [part[0] for part in parts])
    assert_all_same(alone, halves)
    assert all(torch.equal(low, part[1]) for low, part in zip(lows, parts, strict=True))
    joined = clones(wides)
    REFERENCE.join_(halves, lows, joined)
    assert_all_same(again, joined)


@pytest.mark.parametrize("half", [F16, BF16], ids=str)
def test_rounding_is_torchs(ops: Any, half: torch.dtype) -> None:
    """All half values, the midpoints above them, their neighbours in float32; and back."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(half)
    step = 2**12 if half is F16 else 2**15
    offsets = torch.tensor([-1, 0, 1, step - 1, step, step + 1])
    bits = halves.float().view(torch.int32)[:, None] + offsets
    source = bits.reshape(-1).view(F32)
    target, back = torch.empty_like(source, dtype=half), torch.empty_like(source)
    ops.cast_copy_([source], [target])
    assert_same(target, source.to(half))
    ops.cast_copy_([target], [back])
    assert_same(back, target.float())
    other = torch.empty_like(halves, dtype=BF16 if half is F16 else F16)
    ops.cast_copy_([halves], [other])
    assert_same(other, halves.float().to(other.dtype))


# -- census and norms ------------------------------------------------------------------------------


def check_norms(ops: Any, grads: Tensors, ulps: float = ULPS) -> None:
    """The norm of each and of all, with factors and without, in the same bits each time."""
    total = Exact.of(torch.cat([grad.double().reshape(-1) for grad in grads])).norm()
    for by in (None, torch.tensor(0.1)):
        scale = 1.0 if by is None else by.item()
        norms = ops.l2norms(grads, by, CPU)
        assert (norms.shape, norms.dtype) == ((len(grads),), F32)
        for norm, grad in zip(norms, grads, strict=True):
            assert_within_ulps(norm, (Exact.of(grad) * scale).norm(), ulps, computed=F32)
        assert_same(ops.l2norms([*grads], by, CPU), norms)
        found = ops.l2norm(grads, [by] * len(grads), CPU)
        assert found.shape == ()
        assert_within_ulps(found, total * scale, ulps, computed=F32)
    mixed = [[None, torch.tensor(0.1)][place % 2] for place in range(len(grads))]
    scaled = [grad * [1.0, 0.1][place % 2] for place, grad in enumerate(grads)]
    exact = torch.stack([one.double().norm() for one in scaled]).norm()
    assert ops.l2norm(grads, mixed, CPU).item() == pytest.approx(exact.item(), rel=1e-3)
    census = ops.census(grads, CPU, with_norm=True)
    assert_within_ulps(census.norm, total, ulps, computed=F32)
    assert_same(census.found_inf, torch.tensor(0.0))
    census = ops.census(grads, CPU)
    every = [grad.detach().double().abs().reshape(-1) for grad in grads]
    largest = torch.tensor([max([0.0, *each.tolist()]) for each in every]).float()
    assert_same(census.max_abs, largest)
    assert (census.norm, census.found_inf.item()) == (None, 0.0)


def test_census_and_norms_of_every_dtype_and_layout(ops: Any) -> None:
    grads = [*every_kind(), *[values(n, n, DTYPES[n % 4]) for n in CHUNKS]]
    kept = clones(grads)
    check_norms(ops, grads)
    assert_all_same(grads, kept)
    places = [(n, 0, -1)[n % 3] for n, grad in enumerate(grads)]
    each = list(enumerate(places))
    if ops.name == "triton" and not torch.cuda.is_available():
        each = each[::5]  # which has every dtype and every layout, and takes a fifth of the time
    for which, place in [*each, *((-1, at) for at in (1024, 8191, 8192)), (-2, 1030)]:
        if not (grad := grads[which]).numel():
            continue
        at = torch.unravel_index(torch.tensor(place % grad.numel()), grad.shape)
        was, grad[at] = grad[at].clone(), BAD[which % 3]
        census = ops.census(grads, CPU, with_norm=True)
        grad[at] = was
        assert_same(census.found_inf, torch.tensor(1.0))
        assert (~census.max_abs.isfinite()).nonzero().tolist() == [[which % len(grads)]]
        assert not census.norm.isfinite()
    assert_all_same(grads, kept)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_overflow_are_no_overflow(ops: Any, dtype: torch.dtype) -> None:
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert ops.census([largest, -largest], CPU).found_inf == 0
    census = ops.census([largest, -largest], CPU, with_norm=True)
    assert census.found_inf == 0
    if dtype is not F16:
        assert (census.norm.item(), census.max_abs.isfinite().tolist()) == (math.inf, [True] * 2)
    assert ops.census([torch.tensor([math.inf, -math.inf], dtype=dtype)], CPU).found_inf == 1


def test_sparse_gradients_are_read_by_their_sums(ops: Any) -> None:
    for dtype in DTYPES:
        grads = [torch.ones(2), sparse([1.0, 2.0, -4.0], dtype), sparse([], dtype), torch.ones(0)]
        census = ops.census(grads, CPU, with_norm=True)
        assert census.found_inf == 0
        assert ops.census(grads, CPU).max_abs.tolist() == [1.0, 4.0, 0.0, 0.0]
        assert census.norm.item() == pytest.approx(math.sqrt(27), rel=1e-6)
        assert ops.l2norms(grads, None, CPU).tolist() == pytest.approx([2**0.5, 5.0, 0.0, 0.0])
        largest = torch.finfo(dtype).max
        assert ops.census([sparse([largest, largest], dtype)], CPU).found_inf == 1
        assert ops.census([sparse([1.0, 2.0, math.nan], dtype)], CPU).found_inf == 1


@pytest.mark.parametrize("large", [1e100, 1e300])
def test_census_keeps_the_order_of_mixed_gradients(ops: Any, large: float) -> None:
    """Several launches, and tensors that no kernel takes, end up in one result."""
    grads = [
        torch.tensor([3.0], dtype=F16),
        torch.tensor([-4.0]),
        sparse([1.0, 5.0, -2.0], F32),
        torch.tensor([[7.0, math.nan]])[:, ::2],
        torch.tensor([8.0 - 6.0j]),
        torch.tensor([large], dtype=F64),
        torch.tensor([9.0], dtype=F16),
    ]
    census = ops.census(grads, CPU, with_norm=True)
    assert census.max_abs[5] >= torch.finfo(F32).max
    assert census.max_abs[[0, 1, 2, 3, 4, 6]].tolist() == [3.0, 4.0, 6.0, 7.0, 8.0, 9.0]
    assert census.found_inf.item() == 0.0  # it is finite, though not in float32
    assert census.norm.item() == math.inf
    del grads[5]
    wanted = [3.0, 4.0, math.hypot(6, 2), 7.0, 10.0, 9.0]
    census = ops.census(grads, CPU, with_norm=True)
    assert census.norm.item() == pytest.approx(math.hypot(*wanted))
    assert ops.l2norms(grads, None, CPU).tolist() == pytest.approx(wanted)


def test_the_factor_comes_before_the_squares(ops: Any) -> None:
    large = torch.full((100,), 1e25)
    assert ops.l2norms([large], None, CPU).isinf().all()
    norms = ops.l2norms([large, sparse([3.0, 1.0, 3.0]), large], torch.tensor(1e-20), CPU)
    assert norms.tolist() == pytest.approx([1e6, 5e-20, 1e6])
    half = torch.full((10_000,), 65504.0, dtype=F16)
    assert ops.l2norm([half], [None], CPU).item() == pytest.approx(6550400.0, rel=1e-6)
    assert ops.l2norm([torch.full((2,), 1e15)], [torch.tensor(1e30)], CPU).item() == math.inf


def test_norms_of_nothing(ops: Any) -> None:
    ops.scale_add_([], torch.tensor(2.0), [])
    assert_same(ops.l2norms([], None, CPU), torch.zeros(0))
    assert_same(ops.l2norm([], [], CPU), torch.tensor(0.0))
    census = ops.census([], CPU, with_norm=True)
    assert (census.found_inf, census.norm) == (0, 0)
    assert census.max_abs.shape == (0,)
    assert_same(ops.l2norm([torch.ones(0)], [torch.tensor(2.0)], CPU), torch.tensor(0.0))


# -- sizes -----------------------------------------------------------------------------------------


@given(sizes=st.lists(st.integers(0, 20)), most=st.integers(1, 9))
def test_runs_have_every_element_once_and_no_more_than_they_may(
    sizes: list[int], most: int
) -> None:
    column = [torch.arange(size) + 100 * place for place, size in enumerate(sizes)]
    found = list(runs([column], most))
    for run in found:
        assert sum(piece.numel() for piece in run.columns[0]) <= most
    pieces = [
        (place, t) for run in found for place, t in zip(run.places, *run.columns, strict=True)
    ]
    numbers = [number for _, piece in pieces for number in piece.tolist()]
    assert numbers == [number for tensor in column for number in tensor.tolist()]
    assert all(number // 100 == place for place, piece in pieces for number in piece.tolist())


def test_runs_of_very_small_tensors_have_no_more_than_some_hundreds() -> None:
    column = [torch.full((1,), float(place)) for place in range(2000)]
    assert [len(run.places) for run in runs([column], 1 << 20)] == [TOGETHER] * 3 + [464]


@as_they_are
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_sizes_at_the_edges_of_blocks(ops: Any, dtype: torch.dtype) -> None:
    grads = [values(place, size, dtype, spread=4.0) for place, size in enumerate(EDGES)]
    check_norms(ops, grads)
    ys = [None, *[values(9, grad.shape, F32) for grad in grads[1:]]]
    check_sums(ops, grads, ys, [torch.empty_like(grad, dtype=F16) for grad in grads], 0.25, -1.0)
    for grad in grads:
        grad[-1] = math.nan
        assert ops.census(grads, CPU).found_inf == 1
        grad[-1] = 0.0


@as_they_are
@pytest.mark.parametrize("threads", [1, 16])
def test_long_sums_keep_their_digits(ops: Any, threads: int) -> None:
    """Torch's own float32 norm of as many equal values is off by thousands of ulps on a CPU."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # runs grow with them
    try:
        check_norms(ops, [torch.full(((1 << 21) + 5,), 1.1), torch.full((9999,), 1.1)], 2 * ULPS)
    finally:
        torch.set_num_threads(before)


@here
def test_thousands_of_tiny_tensors(ops: Any) -> None:
    joined = values(0, (6_300,), F32, spread=4.0)
    grads = list(joined.split([index % 4 for index in range(4_200)]))
    check_norms(ops, grads, 16)
    copies = [torch.empty_like(grad, dtype=F16) for grad in grads]
    ops.cast_copy_(grads, copies)
    assert_same(torch.cat(copies), joined.half())
    joined[-1] = math.inf
    assert ops.census(grads, CPU).max_abs.isinf().nonzero().tolist() == [[4_199]]
    equal = torch.full((4_200,), 0.7)  # of whose squares torch's float32 sum loses five bits
    total = ops.l2norm(list(equal.split(1)), [None] * 4_200, CPU)
    assert_within_ulps(total, Exact.of(equal).norm(), ULPS, computed=F32)


# -- the process, and other devices ----------------------------------------------------------------


def test_defaults_of_the_process_do_not_matter_to_what_is_read(ops: Any) -> None:
    columns = [[], [torch.ones(0)], [values(place, 9, dtype) for place, dtype in enumerate(DTYPES)]]
    columns[2].append(torch.ones(4, 4)[:, ::2])
    factor = torch.tensor(0.3)

    def read(grads: Tensors) -> list[Any]:
        census = ops.census(grads, CPU, with_norm=True)
        each = ops.l2norms(grads, None, CPU), ops.l2norms(grads, factor, CPU)
        total = ops.l2norm(grads, [[None, factor][i % 2] for i in range(len(grads))], CPU)
        largest = ops.census(grads, CPU).max_abs
        return [census.found_inf, census.norm, largest, *each, total]

    for grads in columns:
        wanted = read(grads)
        assert {result.dtype for result in wanted} == {F32}
        for dtype, device in ((BF16, "cpu"), (F64, "cpu"), (F32, "meta")):
            with defaults(dtype, device):
                found = read(grads)
            assert_all_same(found, wanted)


@pytest.mark.parametrize("dtype", [F16, F32], ids=str)
def test_no_history_is_recorded(ops: Any, dtype: torch.dtype) -> None:
    """Of parameters neither, which torch refuses to change where it records."""
    one = torch.ones(3, dtype=dtype, requires_grad=True)
    grad, factor = one * 2, torch.tensor(2.0, requires_grad=True)
    other = torch.ones(3, requires_grad=True)
    for tensor in (one, grad):
        ops.scale_add_([tensor], factor, [other.detach().to(dtype).requires_grad_()])
        ops.axpby_([tensor], factor, [other], factor, [tensor])
        ops.cast_copy_([other], [tensor])
    results = ops.widen_add([one.half(), one.half()], [factor] * 2, [None, other])
    census = ops.census([one, grad], CPU, with_norm=True)
    results += [census.found_inf, census.norm, ops.census([one, grad], CPU).max_abs]
    results += [ops.l2norms([one, grad], by, CPU) for by in (None, factor)]
    results += [ops.l2norm([one, grad], [None, factor], CPU)]
    assert [result.grad_fn for result in (*results, one)] == [None] * (len(results) + 1)
    assert not any(result.requires_grad for result in results if result is not other)
