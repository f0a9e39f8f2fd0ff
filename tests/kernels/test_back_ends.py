# SPDX-License-Identifier: BSD-3-Clause
"""Scaling, casting, census and norms of every back end, against the reference and float64.

What only one result can be right for is compared bitwise; sums of rounded products and norms are
within the ulps that the op table states.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cases.back_ends import REFERENCE, Elsewhere, as_they_are, defaults, here
from cases.exact import Exact, assert_within_ulps
from cases.layouts import LAYOUTS
from cases.rules import BF16, F16, F32, F64
from cases.selection import examples
from cases.tolerances import assert_same
from preamp.core.dtypes import math_dtype
from preamp.kernels.plain.lists import TOGETHER, runs

# What a dtype takes is written anew in each back end.
pytestmark = pytest.mark.product

CPU = torch.device("cpu")
DTYPES = (F16, BF16, F32, F64)
EDGES = tuple(block + by for block in (1 << 16, 1 << 18) for by in (-1, 0, 1))
ULPS = 4

Tensors = list[torch.Tensor]

dtypes = st.sampled_from(DTYPES)
halves = st.sampled_from((F16, BF16))
shapes = st.sampled_from([(), (0,), (1,), (5,), (41,), (97,), (3, 0, 2), (11, 13), (2, 3, 4, 2)])
bad_values = st.sampled_from([math.inf, -math.inf, math.nan])
powers = st.integers(-24, 15).map(lambda n: 2.0**n)
factors = st.sampled_from([0.1, 1.0, 3.0, 2.0**-16, -0.7])

# The fixture that is made once per test holds a back end, which has no state.
few = settings(
    max_examples=examples(25), suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def values(seed: int, shape: Any, dtype: torch.dtype, spread: float = 8.0) -> torch.Tensor:
    """Both signs, many magnitudes, some zeros, all finite."""
    generator = torch.Generator().manual_seed(seed)
    data = torch.randn(shape, generator=generator, dtype=F64)
    data *= 10.0 ** (spread * (torch.rand(shape, generator=generator, dtype=F64) - 0.5))
    data[data.abs() < 10.0 ** (-spread / 2)] = 0.0
    largest = torch.finfo(dtype).max
    return data.clamp(-largest, largest).to(dtype)


@st.composite
def tensors(draw: Any, dtype: Any = dtypes, shape: Any = shapes) -> torch.Tensor:
    data = values(draw(st.integers(0, 99)), draw(shape), draw(dtype))
    return draw(st.sampled_from(LAYOUTS))(data)


@st.composite
def places(draw: Any, *columns: Any) -> list[Tensors]:
    """Lists with a tensor of each strategy in every place, of one shape."""
    rows = []
    for shape in draw(st.lists(shapes, max_size=6)):
        rows.append([draw(column(st.just(shape))) for column in columns])
    return [list(column) for column in zip(*rows, strict=True)] or [[] for _ in columns]


def of(dtype: Any = dtypes) -> Callable[[Any], Any]:
    return lambda shape: tensors(dtype, shape)


def or_none(strategy: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda shape: st.none() | strategy(shape)


def sparse(numbers: list[float], dtype: torch.dtype = F32) -> torch.Tensor:
    """A sparse vector whose first two values belong to the same row."""
    rows = torch.tensor([[1, 1, 4][: len(numbers)]])
    data = torch.tensor(numbers, dtype=dtype)
    return torch.sparse_coo_tensor(rows, data, (6,), check_invariants=True)


def clones(column: list[Any]) -> list[Any]:
    return [None if tensor is None else tensor.clone() for tensor in column]


def largest_of(grads: Tensors) -> torch.Tensor:
    """The largest magnitude of each, as a census tells it."""
    every = [grad.detach().double().abs().reshape(-1) for grad in grads]
    return torch.tensor([max([0.0, *each.tolist()]) for each in every]).float()


def assert_all_same(ours: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(ours, wanted, strict=True):
        assert_same(one, other)


# -- census ------------------------------------------------------------------------------------


@few
@given(grads=st.lists(tensors(), max_size=6), with_norm=st.booleans())
def test_census_of_finite_gradients(ops: Any, grads: Tensors, with_norm: bool) -> None:
    before = clones(grads)
    census = ops.census(grads, CPU, with_norm=with_norm)
    assert_same(census.found_inf, torch.tensor(0.0))
    assert (census.norm is not None) == with_norm
    if census.max_abs is not None or not with_norm:
        assert_same(census.max_abs, largest_of(grads))
    if with_norm:
        assert_same(census.norm, ops.l2norm(grads, [None] * len(grads), CPU))
    assert_all_same(grads, before)


@few
@given(grads=st.lists(tensors(), min_size=1, max_size=6), bad=bad_values, data=st.data())
def test_census_finds_one_bad_value_anywhere(
    ops: Any, grads: Tensors, bad: float, data: Any
) -> None:
    grads.append(torch.ones(1))
    filled = [place for place, grad in enumerate(grads) if grad.numel()]
    which = data.draw(st.sampled_from(filled))
    flat = data.draw(st.integers(0, grads[which].numel() - 1))
    grads[which][torch.unravel_index(torch.tensor(flat), grads[which].shape)] = bad
    census = ops.census(grads, CPU, with_norm=True)
    assert_same(census.found_inf, torch.tensor(1.0))
    others = [place for place in range(len(grads)) if place != which]
    assert_same(census.max_abs[others], largest_of([grads[place] for place in others]))
    assert (~census.max_abs.isfinite()).nonzero().tolist() == [[which]]
    assert not census.norm.isfinite()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_that_overflow_are_no_overflow(ops: Any, dtype: torch.dtype) -> None:
    largest = torch.full((1000,), torch.finfo(dtype).max, dtype=dtype)
    assert ops.census([largest, -largest], CPU).found_inf == 0
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


# -- scaling -----------------------------------------------------------------------------------


def assert_sums(got: torch.Tensor, computed: torch.dtype, *terms: tuple[Any, float]) -> None:
    """``got`` is the sum of tensors times their factors."""
    products = [Exact.of(tensor) * factor for tensor, factor in terms if tensor is not None]
    total = products[0] if len(products) == 1 else products[0] + products[1]
    assert_within_ulps(got, total, ULPS, computed=computed)


@few
@given(columns=places(of(), of()), factor=factors, as_tensor=st.booleans(), data=st.data())
def test_scaling_and_adding(
    ops: Any, columns: list[Tensors], factor: float, as_tensor: bool, data: Any
) -> None:
    grads, others = columns
    addends = [
        data.draw(st.sampled_from([None, other.to(grad.dtype)]))
        for grad, other in zip(grads, others, strict=True)
    ]
    old, kept = clones(grads), clones(addends)
    ops.scale_add_(grads, torch.tensor(factor) if as_tensor else factor, addends)
    by = torch.tensor(factor).item() if as_tensor else factor
    for got, grad, addend in zip(grads, old, kept, strict=True):
        assert_sums(got, math_dtype(got.dtype), (grad, by), (addend, 1.0))
    assert_all_same(addends, kept)


@few
@given(grads=st.lists(tensors(), max_size=6), factor=powers)
def test_scaling_by_powers_of_two_is_exact(ops: Any, grads: Tensors, factor: float) -> None:
    wanted = clones(grads)
    REFERENCE.scale_add_(wanted, factor, [None] * len(grads))
    ops.scale_add_(grads, torch.tensor(factor), [None] * len(grads))
    assert_all_same(grads, wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaling_sparse_gradients(ops: Any, dtype: torch.dtype) -> None:
    grads = [torch.ones(2, dtype=dtype), sparse([1.0, 2.0, -4.0], dtype), sparse([1.0], dtype)]
    before = list(grads)
    ops.scale_add_(grads, torch.tensor(0.5), [None, sparse([8.0], dtype), None])
    assert all(grad is old for grad, old in zip(grads, before, strict=True))
    assert_same(grads[1].to_dense(), torch.tensor([0, 9.5, 0, 0, -2.0, 0], dtype=dtype))
    assert_same(grads[2].to_dense(), torch.tensor([0, 0.5, 0, 0, 0, 0], dtype=dtype))


def test_scaling_complex_gradients(ops: Any) -> None:
    grads = [torch.tensor([2 + 4j]), torch.ones(1)]
    ops.scale_add_(grads, torch.tensor(0.5), [None, None])
    assert [grad.tolist() for grad in grads] == [[1 + 2j], [0.5]]
    assert ops.census(grads, CPU).max_abs.tolist() == [2.0, 0.5]


@few
@given(
    columns=places(of(halves), or_none(of(st.just(F32)))),
    choice=st.lists(st.sampled_from([0.5, 0.1, 2.0**-16]), min_size=6, max_size=6),
)
def test_widening_and_adding(ops: Any, columns: list[list[Any]], choice: list[float]) -> None:
    narrow, addends = columns
    shared = {number: torch.tensor(number) for number in choice}
    by = [shared[number] for number in choice[: len(narrow)]]
    old, kept = clones(narrow), clones(addends)
    results = ops.widen_add(narrow, by, addends)
    for got, half, factor, addend, base in zip(results, old, by, addends, kept, strict=True):
        assert got.dtype is F32
        assert got is addend or addend is None
        assert_sums(got, F32, (half, factor.item()), (base, 1.0))
        if base is None:
            assert_same(got, half.float() * factor)
            got.fill_(3.0)  # memory of its own
    assert_all_same(narrow, old)


def test_widening_keeps_the_layout(ops: Any) -> None:
    image = torch.ones(2, 3, 4, 5, dtype=F16).to(memory_format=torch.channels_last)
    given = [image, image.clone().mT]
    results = ops.widen_add(given, [torch.tensor(2.0)] * 2, [None, None])
    assert [wide.stride() for wide in results] == [one.stride() for one in given]


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


# -- casting -----------------------------------------------------------------------------------


@few
@given(columns=places(of(), of()), bad=bad_values)
def test_casting_is_torchs(ops: Any, columns: list[Tensors], bad: float) -> None:
    sources, targets = columns
    for source in sources:
        if source.numel():
            source[(0,) * source.dim()] = bad
    kept = clones(sources)
    ops.cast_copy_(sources, targets)
    for source, target in zip(sources, targets, strict=True):
        assert_same(target, source.to(target.dtype))
    assert_all_same(sources, kept)


# -- linear combinations -----------------------------------------------------------------------


@few
@given(columns=places(of(), of(), or_none(of())), a=factors, b=factors, as_tensors=st.booleans())
def test_linear_combinations(
    ops: Any, columns: list[list[Any]], a: float, b: float, as_tensors: bool
) -> None:
    targets, xs, ys = columns
    kept = clones(xs), clones(ys)
    if as_tensors:
        a, b = torch.tensor(a).item(), torch.tensor(b).item()
    ops.axpby_(
        targets,
        *(torch.tensor(a) if as_tensors else a, xs),
        *(torch.tensor(b) if as_tensors else b, ys),
    )
    for got, x, y in zip(targets, xs, ys, strict=True):
        narrow = any(t is not None and t.dtype is not F64 for t in (x, y))
        assert_sums(got, F32 if narrow else F64, (x, a), (y, b))
    assert_all_same(xs, kept[0])
    assert_all_same(ys, kept[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_combinations_onto_their_inputs(ops: Any, dtype: torch.dtype) -> None:
    x, y = torch.tensor([1.0, 2.0], dtype=dtype), torch.tensor([4.0, 8.0], dtype=dtype)
    ops.axpby_([x], 2.0, [x], 1.0, [y])
    assert x.tolist() == [6.0, 12.0]
    ops.axpby_([y], torch.tensor(2.0), [x], torch.tensor(1.0), [y])
    assert y.tolist() == [16.0, 32.0]


def test_each_product_is_rounded_in_its_own_precision(ops: Any) -> None:
    wide, narrow = torch.full((3,), 1 / 3, dtype=F64), torch.ones(3)
    for x, y in ((narrow, wide), (wide, narrow)):
        target = torch.zeros(3, dtype=F64)
        ops.axpby_([target], 1.0, [x], 1.0, [y])
        assert target.tolist() == [1 + 1 / 3] * 3


@pytest.mark.parametrize(("a", "b"), [(0.1, 3.0), (-0.7, 0.1)])
def test_every_bit_is_the_references(ops: Any, a: float, b: float) -> None:
    """No product is fused with a sum, and halves are split and joined as defined."""
    kinds = list(itertools.product(DTYPES, (None, *DTYPES), LAYOUTS))[::3]
    count = len(kinds)
    shapes = [(33, 31), (5, 3, 4, 2), (0,), (1,)]
    xs, ys, targets = [], [], []
    for place, (kind, other, layout) in enumerate(kinds):
        shape = shapes[place % 4 if place % 8 > 3 else place % 2]
        xs.append(layout(values(place, shape, kind)))
        ys.append(None if other is None else values(100 + place, shape, other))
        targets.append(torch.zeros(shape, dtype=DTYPES[place % 3]))
    wide = [x.float() for x in xs]
    wide[0].view(-1)[:4] = torch.tensor([math.nan, -math.inf, 65519.9, 65520.0])
    narrow = [torch.zeros(x.shape, dtype=(F16, BF16)[place % 2]) for place, x in enumerate(xs)]
    found: list[list[Any]] = []
    for back_end in (ops, REFERENCE):
        sums, scaled, cast, back, added = map(clones, (targets, xs, targets, wide, wide))
        halves, alone, low = *map(clones, (narrow, narrow)), [half.short() for half in narrow]
        back_end.axpby_(sums, torch.tensor(a), xs, b, ys)
        back_end.scale_add_(scaled, torch.tensor(b), [None] * count)
        back_end.cast_copy_(xs, cast)
        written = [t for t in (*halves, *low, *back) if t.numel()]
        before = [t._version for t in written]
        back_end.split_(wide, halves, low)
        back_end.split_(wide, alone, [None] * count)
        back_end.join_(halves, low, back)
        assert all(t._version > was for t, was in zip(written, before, strict=True))
        back_end.widen_add(halves, [torch.tensor(a)] * count, added)
        found.append([*sums, *scaled, *cast, *halves, *alone, *low, *back, *added])
    assert_all_same(*found)


# -- norms -------------------------------------------------------------------------------------


@few
@given(grads=st.lists(tensors(), max_size=6), factor=st.none() | factors)
def test_norms(ops: Any, grads: Tensors, factor: float | None) -> None:
    by = None if factor is None else torch.tensor(factor)
    scale = 1.0 if by is None else by.item()
    wanted = [(Exact.of(grad) * scale).norm() for grad in grads]
    norms = ops.l2norms(grads, by, CPU)
    assert norms.shape == (len(grads),)
    assert norms.dtype is F32
    for norm, exact in zip(norms, wanted, strict=True):
        assert_within_ulps(norm, exact, ULPS, computed=F32)
    each = [by if place % 2 else None for place in range(len(grads))]
    lengths = [Exact.of(g) * (scale if place % 2 else 1.0) for place, g in enumerate(grads)]
    squares = sum(float(length.value.square().sum()) for length in lengths)
    total = ops.l2norm(grads, each, CPU)
    assert total.dim() == 0
    exact = Exact.of(torch.tensor(squares, dtype=F64).sqrt())
    assert_within_ulps(total, exact, ULPS, computed=F32)


def test_the_factor_comes_before_the_squares(ops: Any) -> None:
    large = torch.full((100,), 1e25)
    assert ops.l2norms([large], None, CPU).isinf().all()
    norms = ops.l2norms([large, sparse([3.0, 1.0, 3.0]), large], torch.tensor(1e-20), CPU)
    assert norms.tolist() == pytest.approx([1e6, 5e-20, 1e6])
    half = torch.full((10_000,), 65504.0, dtype=F16)
    assert ops.l2norm([half], [None], CPU).item() == pytest.approx(6550400.0, rel=1e-6)


def test_norms_of_nothing(ops: Any) -> None:
    assert_same(ops.l2norms([], None, CPU), torch.zeros(0))
    assert_same(ops.l2norm([], [], CPU), torch.tensor(0.0))
    census = ops.census([], CPU, with_norm=True)
    assert (census.found_inf, census.norm) == (0, 0)
    assert census.max_abs.shape == (0,)
    assert_same(ops.l2norm([torch.ones(0)], [torch.tensor(2.0)], CPU), torch.tensor(0.0))


# -- sizes ---------------------------------------------------------------------------------------


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
    grads = [values(place, size, dtype) for place, size in enumerate(EDGES)]
    exact = [Exact.of(grad).norm() for grad in grads]
    for norms in (ops.l2norms(grads, None, CPU), ops.l2norms(grads, torch.ones(()), CPU)):
        for norm, length in zip(norms, exact, strict=True):
            assert_within_ulps(norm, length, ULPS, computed=F32)
    assert_same(ops.census(grads, CPU).max_abs, REFERENCE.census(grads, CPU).max_abs)
    copies = [torch.empty_like(grad, dtype=F16) for grad in grads]
    ops.cast_copy_(grads, copies)
    assert_all_same(copies, [grad.half() for grad in grads])
    targets, others, wanted = clones(grads), clones(grads), clones(grads)
    REFERENCE.axpby_(wanted, 0.25, grads, -1.0, grads)
    ops.axpby_(targets, 0.25, grads, -1.0, grads)
    ops.scale_add_(others, torch.tensor(0.25), [-grad for grad in grads])
    assert_all_same(targets, wanted)
    assert_all_same(others, wanted)
    for grad in grads:
        grad[-1] = math.nan
        assert ops.census(grads, CPU).found_inf == 1
        grad[-1] = 0.0


@as_they_are
@pytest.mark.parametrize("threads", [1, 16])
def test_long_sums_keep_their_digits(ops: Any, threads: int) -> None:
    """Torch's own float32 norm of as many equal values is off by thousands of ulps on a CPU."""
    many = [torch.full(((1 << 21) + 5,), 1.1), torch.full((9999,), 1.1)]
    exact = [Exact.of(tensor).norm() for tensor in many]
    total = Exact.of(torch.cat(many)).norm()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)  # blocks of the cpu back end grow with them
    try:
        for norms in (ops.l2norms(many, None, CPU), ops.l2norms(many, torch.ones(()), CPU)):
            for norm, length in zip(norms, exact, strict=True):
                assert_within_ulps(norm, length, 2 * ULPS, computed=F32)
        assert_within_ulps(ops.l2norm(many, [None] * 2, CPU), total, 2 * ULPS, computed=F32)
        norm = ops.census(many, CPU, with_norm=True).norm
        assert_within_ulps(norm, total, 2 * ULPS, computed=F32)
    finally:
        torch.set_num_threads(before)


@here
def test_ten_thousand_tiny_tensors(ops: Any) -> None:
    joined = values(0, (15_000,), F32)
    grads = list(joined.split([index % 4 for index in range(10_000)]))
    census = ops.census(grads, CPU, with_norm=True)
    assert census.found_inf == 0
    assert_same(ops.census(grads, CPU).max_abs, REFERENCE.census(grads, CPU).max_abs)
    assert_within_ulps(census.norm, Exact.of(joined).norm(), 16, computed=F32)
    copies = [torch.empty_like(grad, dtype=F16) for grad in grads]
    ops.cast_copy_(grads, copies)
    assert_same(torch.cat(copies), joined.half())
    joined[-1] = math.inf
    assert ops.census(grads, CPU).max_abs.isinf().nonzero().tolist() == [[9_999]]


# -- tests of another device -------------------------------------------------------------------


def test_a_back_end_of_another_device_writes_back() -> None:
    """What GPUs are tested through, between the reference and copies that lie elsewhere."""
    elsewhere: Any = Elsewhere(REFERENCE, CPU)
    found: list[Tensors] = []
    for ops in (REFERENCE, elsewhere):
        grads, addend = [torch.arange(6.0).view(2, 3).t(), torch.ones(4)], torch.ones(3, 2)
        ops.scale_add_(grads, 0.5, [addend, None])
        ops.axpby_([addend], 2.0, [addend], 1.0, [grads[0]])  # one tensor, read and written
        found.append([*grads, addend, ops.l2norms(grads, None, CPU)])
    for ours, wanted in zip(found[1], found[0], strict=True):
        assert_same(ours, wanted)
    assert found[1][1].tolist() == [0.5] * 4
    values = torch.ones(4)
    with pytest.raises(ValueError, match="tensors of one call overlap"):
        elsewhere.scale_add_([values, values[1:]], 0.5, [None, None])
    assert values.tolist() == [1.0] * 4
