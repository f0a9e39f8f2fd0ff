# SPDX-License-Identifier: BSD-3-Clause
"""The ``multi_tensor_l2norm`` family, scaling, and ``update_scale_hysteresis``."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases.selection import examples
from cases.tolerances import assert_same
from kit.refusals import refused
from multi_tensor.strategies import (
    DTYPES,
    assert_rounded,
    copies,
    dtypes,
    in_float64,
    in_layout,
    layouts,
    math_of,
    new_flag,
    random_list,
    seeds,
    shapes,
)
from preamp.compat.multi_tensor import amp_C

Tensors = list[torch.Tensor]
Op = Callable[[torch.Tensor, Tensors, bool | None], tuple[torch.Tensor, torch.Tensor]]

FAMILY: dict[str, Op] = {
    "l2norm": lambda flag, x, each: amp_C.multi_tensor_l2norm(65536, flag, [x], each),
    "l2norm_mp": lambda flag, x, each: amp_C.multi_tensor_l2norm_mp(65536, flag, [x], each),
    "l2norm_scale": lambda flag, x, each: amp_C.multi_tensor_l2norm_scale(
        65536, flag, [x, copies(x)], 0.25, each
    ),
    "unscale_l2norm": lambda flag, x, each: amp_C.multi_tensor_unscale_l2norm(
        65536, flag, [x], torch.ones(1), each
    ),
}
family = pytest.mark.parametrize("op", FAMILY.values(), ids=FAMILY.keys())


def exact_norms(tensors: Tensors, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    each = torch.stack([(t * factor).square().sum().sqrt() for t in in_float64(tensors)])
    return each.square().sum().sqrt().view(1), each


def assert_norms(ours: tuple[torch.Tensor, ...], wanted: tuple[torch.Tensor, ...]) -> None:
    for got, exact in zip(ours, wanted, strict=True):
        assert got.dtype is torch.float32
        assert got.shape == exact.shape
        assert_rounded([got], [exact], ulps=32)


@family
@settings(max_examples=examples(25))
@given(shapes=shapes, dtype=dtypes, seed=seeds, layout=layouts)
def test_norms(op: Op, shapes: Any, dtype: torch.dtype, seed: int, layout: str) -> None:
    tensors, flag = random_list(shapes, dtype, seed, layout=layout), new_flag()
    before = copies(tensors)
    assert_norms(op(flag, tensors, True), exact_norms(tensors))
    assert flag.item() == 0
    for tensor, was in zip(tensors, before, strict=True):
        assert_same(tensor, was)


@family
@pytest.mark.parametrize("per_tensor", [None, False])
def test_norms_per_tensor_are_empty_unless_asked_for(op: Op, per_tensor: bool | None) -> None:
    norm, each = op(new_flag(), [torch.tensor([3.0]), torch.tensor([4.0])], per_tensor)
    assert_same(norm, torch.tensor([5.0]))
    assert_same(each, torch.zeros(0))


@family
@settings(max_examples=examples(15))
@given(
    dtype=dtypes, value=st.sampled_from([math.inf, -math.inf, math.nan]), place=st.integers(0, 8)
)
def test_a_bad_value_sets_the_flag(op: Op, dtype: torch.dtype, value: float, place: int) -> None:
    tensors, flag = random_list([(5,), (0,), (2, 2)], dtype), new_flag()
    tensors[0 if place < 5 else 2].view(-1)[place if place < 5 else place - 5] = value
    norm, each = op(flag, tensors, True)
    assert flag.item() == 1
    assert not torch.isfinite(norm)
    assert torch.isfinite(each).tolist() == [place >= 5, True, place < 5]


@family
def test_a_sum_that_overflows_sets_the_flag(op: Op) -> None:
    flag = new_flag()
    norm, _ = op(flag, [torch.full((100,), 1e25)], None)
    assert (norm.item(), flag.item()) == (math.inf, 1)


@family
def test_float16_values_cannot_overflow(op: Op) -> None:
    flag = new_flag()
    norm, _ = op(flag, [torch.full((10000,), 65504.0, dtype=torch.float16)], None)
    assert norm.item() == pytest.approx(6550400.0, rel=1e-6)
    assert flag.item() == 0


def test_only_the_mp_norm_looks_at_the_flag() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([math.nan])]
    for name, op in FAMILY.items():
        flag = new_flag(1)
        norm, each = op(flag, tensors[:1], True)
        assert [norm.item(), *each.tolist()] == ([0.0, 0.0] if name == "l2norm_mp" else [3.0, 3.0])
        assert flag.item() == 1
    norm, each = amp_C.multi_tensor_l2norm_mp(65536, new_flag(1), [tensors], True)
    assert [norm.item(), *each.tolist()] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_scaling_with_norms(dtype: torch.dtype, out_dtype: torch.dtype, layout: str) -> None:
    sources = random_list([(7,), (0,), (2, 3, 2, 2)], dtype, layout=layout)
    outs = [torch.full_like(source, math.nan, dtype=out_dtype) for source in sources]
    norms = amp_C.multi_tensor_l2norm_scale(65536, new_flag(), [sources, outs], 0.3, True)
    assert_norms(norms, exact_norms(sources))
    assert_rounded(outs, [t * 0.3 for t in in_float64(sources)], math=math_of(dtype))


def test_scaling_with_norms_onto_itself() -> None:
    grads, flag = [torch.tensor([3.0, 4.0]), torch.tensor([math.inf])], new_flag()
    norm, _ = amp_C.multi_tensor_l2norm_scale(65536, flag, [grads, grads], 2.0, False)
    assert (norm.item(), flag.item()) == (math.inf, 1)
    assert [grad.tolist() for grad in grads] == [[6.0, 8.0], [math.inf]]


@settings(max_examples=examples(25))
@given(shapes, dtypes, seeds, st.sampled_from([1.0, 2.0**-16, 0.1, 3.0]))
def test_unscaled_norms(shapes: Any, dtype: torch.dtype, seed: int, inv_scale: float) -> None:
    tensors = random_list(shapes, dtype, seed)
    factor = torch.tensor([inv_scale])
    norms = amp_C.multi_tensor_unscale_l2norm(65536, new_flag(), [tensors], factor, True)
    assert_norms(norms, exact_norms(tensors, factor.item()))


def test_what_unscaling_brings_back_is_no_overflow() -> None:
    flag = new_flag()
    factor = torch.tensor([2.0**-40])
    large = [torch.full((100,), 2.0**80)]
    norm, _ = amp_C.multi_tensor_unscale_l2norm(65536, flag, [large], factor)
    assert (norm.item(), flag.item()) == (10 * 2.0**40, 0)


# -- scale and axpby --------------------------------------------------------------------------


bad_values = st.sampled_from([math.inf, -math.inf, math.nan])
factors = st.sampled_from([0.0, 1.0, -0.5, 2.0**-16, 3.0, 0.1, 65536.0])


def with_one_bad(tensors: list[torch.Tensor], value: float, data: Any) -> None:
    """Write ``value`` somewhere."""
    places = [(i, j) for i, t in enumerate(tensors) for j in range(t.numel())]
    assume(places)
    which, place = data.draw(st.sampled_from(places))
    tensors[which].view(-1)[place] = value


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(12))
@given(shapes=shapes, seed=seeds, scale=factors, layout=layouts)
def test_scale(
    dtype: torch.dtype, out_dtype: torch.dtype, shapes: Any, seed: int, scale: float, layout: str
) -> None:
    sources = random_list(shapes, dtype, seed, layout=layout)
    before, flag = copies(sources), new_flag()
    targets = [in_layout(torch.full_like(s, math.nan, dtype=out_dtype), layout) for s in sources]
    assert amp_C.multi_tensor_scale(65536, flag, [sources, targets], scale) is None
    exact = [tensor * scale for tensor in in_float64(sources)]
    assert_rounded(targets, exact, math=math_of(dtype))
    assert flag.item() == 0
    for source, was in zip(sources, before, strict=True):
        assert_same(source, was)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scale_onto_itself(dtype: torch.dtype) -> None:
    grads = [torch.tensor([8.0, -4.0], dtype=dtype), torch.tensor([[1.0]], dtype=dtype)]
    amp_C.multi_tensor_scale(65536, new_flag(), [grads, grads], 0.25)
    assert [grad.flatten().tolist() for grad in grads] == [[2.0, -1.0], [0.25]]


@settings(max_examples=examples(30))
@given(shapes, dtypes, dtypes, bad_values, st.data())
def test_scale_flags_one_bad_value_and_still_writes(
    shapes: Any, dtype: torch.dtype, out_dtype: torch.dtype, value: float, data: Any
) -> None:
    sources = random_list(shapes, dtype)
    with_one_bad(sources, value, data)
    targets = [torch.full_like(source, 7.0, dtype=out_dtype) for source in sources]
    flag = new_flag()
    amp_C.multi_tensor_scale(65536, flag, [sources, targets], 0.5)
    assert flag.item() == 1
    for source, target in zip(sources, targets, strict=True):
        assert_same(target, (source.double() * 0.5).to(out_dtype))


def test_finite_values_that_leave_the_output_dtype_are_not_flagged() -> None:
    flag, out = new_flag(), torch.zeros(1, dtype=torch.float16)
    amp_C.multi_tensor_scale(65536, flag, [[torch.tensor([6e4])], [out]], 2.0)
    assert (flag.item(), out.item()) == (0, math.inf)


def test_the_flag_is_never_reset() -> None:
    for op, lists, args in (
        (amp_C.multi_tensor_scale, 2, (1.0,)),
        (amp_C.multi_tensor_axpby, 3, (1.0, 1.0, -1)),
        (amp_C.multi_tensor_l2norm, 1, ()),
    ):
        flag = new_flag(1)
        op(65536, flag, [[torch.ones(3)] for _ in range(lists)], *args)
        assert flag.item() == 1


def test_a_scale_on_the_device() -> None:
    values = torch.tensor([2.0, 4.0])
    amp_C.multi_tensor_scale(65536, new_flag(), [[values], [values]], torch.tensor([0.5]))
    assert values.tolist() == [1.0, 2.0]
    with refused("multi_tensor", "two scales"):
        amp_C.multi_tensor_scale(65536, new_flag(), [[values], [values]], torch.ones(2))


# -- axpby -----------------------------------------------------------------------------------


@pytest.mark.parametrize("out_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=examples(12))
@given(shapes=shapes, seed=seeds, y_dtype=dtypes, a=factors, b=factors, layout=layouts)
def test_axpby(
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    shapes: Any,
    seed: int,
    y_dtype: torch.dtype,
    a: float,
    b: float,
    layout: str,
) -> None:
    xs = random_list(shapes, dtype, seed, layout=layout)
    ys = random_list(shapes, y_dtype, seed + 1)
    outs = [torch.full_like(x, math.nan, dtype=out_dtype) for x in xs]
    flag = new_flag()
    amp_C.multi_tensor_axpby(65536, flag, [xs, ys, outs], a, b, -1)
    pairs = [(x * a, y * b) for x, y in zip(in_float64(xs), in_float64(ys), strict=True)]
    sizes = [x.abs() + y.abs() for x, y in pairs]
    assert_rounded(outs, [x + y for x, y in pairs], sizes, math=math_of(dtype, y_dtype))
    assert flag.item() == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("out", [0, 1])
def test_axpby_onto_an_input(dtype: torch.dtype, out: int) -> None:
    lists = [[torch.tensor([3.0, 1.0], dtype=dtype)], [torch.tensor([2.0, -8.0], dtype=dtype)]]
    amp_C.multi_tensor_axpby(65536, new_flag(), [*lists, lists[out]], 2.0, 0.5, -1)
    assert lists[out][0].tolist() == [7.0, -2.0]


@settings(max_examples=examples(30))
@given(shapes, dtypes, dtypes, bad_values, st.sampled_from([0, 1]), st.data())
def test_axpby_flags_what_it_is_told_to_check(
    shapes: Any, dtype: torch.dtype, y_dtype: torch.dtype, value: float, bad: int, data: Any
) -> None:
    inputs = [random_list(shapes, dtype), random_list(shapes, y_dtype, 1)]
    with_one_bad(inputs[bad], value, data)
    for arg_to_check in (-1, 0, 1):
        outs, flag = random_list(shapes, torch.float32), new_flag()
        amp_C.multi_tensor_axpby(65536, flag, [*inputs, outs], 1.0, 1.0, arg_to_check)
        assert flag.item() == (arg_to_check in (-1, bad))
        assert not all(torch.isfinite(out).all() for out in outs)


# -- the scale with hysteresis, against the rule in plain Python ------------------------------


LARGE = 2.0**127


def model(
    state: tuple[float, int, int], found_inf: float, interval: int, hysteresis: int
) -> tuple[float, int, int]:
    """What one update makes of scale, growth tracker and hysteresis tracker."""
    scale, clean, tolerated = state
    if found_inf > 0:
        tolerated -= 1
        return (scale if tolerated > 0 else scale * 0.5), 0, tolerated
    clean += 1
    if clean >= interval:
        return (scale * 2.0 if scale * 2.0 < 2.0**128 else scale), 0, hysteresis
    return scale, clean, hysteresis


@given(
    st.sampled_from([1.0, 65536.0, LARGE]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.sampled_from([0.0, 1.0, 3.0]), max_size=20),
)
def test_a_run_follows_the_rule(
    start: float, interval: int, hysteresis: int, overflows: list[float]
) -> None:
    state = (start, 0, hysteresis)
    scale = torch.tensor([start])
    clean, tolerated = (torch.tensor([n], dtype=torch.int32) for n in (0, hysteresis))
    for found_inf in overflows:
        state = model(state, found_inf, interval, hysteresis)
        returned = amp_C.update_scale_hysteresis(
            scale, clean, tolerated, torch.tensor([found_inf]), 2.0, 0.5, interval, hysteresis
        )
        assert returned is scale
        assert (scale.item(), clean.item(), tolerated.item()) == state


def test_the_scale_has_no_floor() -> None:
    scale, counts = torch.tensor([2.0**-149]), torch.ones(2, 1, dtype=torch.int32)
    amp_C.update_scale_hysteresis(scale, counts[0], counts[1], torch.ones(1), 2.0, 0.5, 1, 1)
    assert scale.item() == 0.0


@pytest.mark.parametrize(
    "name", ["current_scale", "growth_tracker", "hysteresis_tracker", "found_inf"]
)
def test_wrong_tensors_are_refused(name: str) -> None:
    tensors = {
        "current_scale": torch.ones(1),
        "growth_tracker": torch.ones(1, dtype=torch.int32),
        "hysteresis_tracker": torch.ones(1, dtype=torch.int32),
        "found_inf": torch.ones(1),
    }
    kind = str(tensors[name].dtype).removeprefix("torch.")
    tensors[name] = torch.ones(1, dtype=torch.float64)
    with refused("multi_tensor", "hysteresis, float64", tensor=name, dtype=kind):
        amp_C.update_scale_hysteresis(*tensors.values(), 2.0, 0.5, 1, 1)
    assert all(tensor.item() == 1 for tensor in tensors.values())
