# SPDX-License-Identifier: BSD-3-Clause
"""The ``multi_tensor_l2norm`` family, scaling, and ``update_scale_hysteresis``."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from cases.tolerances import assert_same
from kit.refusals import refused
from multi_tensor.strategies import (
    DTYPES,
    SHAPES,
    assert_rounded,
    copies,
    in_float64,
    in_layout,
    math_of,
    new_flag,
    random_list,
)
from preamp.compat.multi_tensor import amp_C

Tensors = list[torch.Tensor]
BAD = (math.inf, -math.inf, math.nan)

every_dtype = pytest.mark.parametrize("dtype", DTYPES)
every_out = pytest.mark.parametrize("out_dtype", DTYPES)

FAMILY: dict[str, Callable[..., tuple[torch.Tensor, torch.Tensor]]] = {
    "l2norm": lambda flag, x, each=None: amp_C.multi_tensor_l2norm(65536, flag, [x], each),
    "l2norm_mp": lambda flag, x, each=None: amp_C.multi_tensor_l2norm_mp(65536, flag, [x], each),
    "l2norm_scale": lambda flag, x, each=None: amp_C.multi_tensor_l2norm_scale(
        65536, flag, [x, copies(x)], 0.25, each
    ),
    "unscale_l2norm": lambda flag, x, each=None: amp_C.multi_tensor_unscale_l2norm(
        65536, flag, [x], torch.ones(1), each
    ),
}
family = pytest.mark.parametrize("op", FAMILY.values(), ids=FAMILY.keys())


def assert_norms(ours: Sequence[torch.Tensor], tensors: Tensors, factor: float = 1.0) -> None:
    """The norm of all, and those of each."""
    each = torch.stack([(t * factor).square().sum().sqrt() for t in in_float64(tensors)])
    for got, exact in zip(ours, (each.square().sum().sqrt().view(1), each), strict=True):
        assert (got.dtype, got.shape) == (torch.float32, exact.shape)
        assert_rounded([got], [exact], ulps=32)


@pytest.mark.product
@every_dtype
@every_out
def test_norms_and_sums_are_their_formulas(dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """In every layout; what is read stays as it is."""
    for layout in ("contiguous", "channels_last"):
        xs = random_list(SHAPES, dtype, layout=layout)
        ys = random_list(SHAPES, out_dtype, 1)
        before, flag = [copies(xs), copies(ys)], new_flag()

        def outs(layout: str = layout, xs: Any = xs) -> Tensors:
            return [in_layout(torch.full_like(x, math.nan, dtype=out_dtype), layout) for x in xs]

        for op in FAMILY.values():
            assert_norms(op(flag, xs, True), xs)
        for by in (0.0, 1.0, -0.5, 2.0**-16, 0.1, 3.0):
            targets, exact = outs(), [x * by for x in in_float64(xs)]
            assert amp_C.multi_tensor_scale(65536, flag, [xs, targets], by) is None
            assert_rounded(targets, exact, math=math_of(dtype))
            targets = outs()
            norms = amp_C.multi_tensor_l2norm_scale(65536, flag, [xs, targets], by, True)
            assert_norms(norms, xs)
            assert_rounded(targets, exact, math=math_of(dtype))
            factor, targets = torch.tensor([by]), outs("contiguous")
            norms = amp_C.multi_tensor_unscale_l2norm(65536, flag, [xs], factor, True)
            assert_norms(norms, xs, factor.item())
            amp_C.multi_tensor_axpby(65536, flag, [xs, ys, targets], by, 0.7, -1)
            pairs = [(x * by, y * 0.7) for x, y in zip(in_float64(xs), in_float64(ys), strict=True)]
            sizes = [x.abs() + y.abs() for x, y in pairs]
            exact = [x + y for x, y in pairs]
            assert_rounded(targets, exact, sizes, math=math_of(dtype, out_dtype))
        assert flag.item() == 0
        for ours, wanted in zip([*xs, *ys], before[0] + before[1], strict=True):
            assert_same(ours, wanted)


@every_dtype
def test_results_onto_their_inputs(dtype: torch.dtype) -> None:
    def lists() -> list[Tensors]:
        values = ([8.0, -4.0], [[1.0]]), ([2.0, -8.0], [[0.5]])
        return [[torch.tensor(one, dtype=dtype) for one in each] for each in values]

    xs, _ = lists()
    amp_C.multi_tensor_scale(65536, new_flag(), [xs, xs], torch.tensor([0.25]))
    assert [x.flatten().tolist() for x in xs] == [[2.0, -1.0], [0.25]]
    with refused("multi_tensor", "two scales"):
        amp_C.multi_tensor_scale(65536, new_flag(), [xs, xs], torch.ones(2))
    norm, _ = amp_C.multi_tensor_l2norm_scale(65536, new_flag(), [xs[:1], xs[:1]], 2.0, False)
    assert norm.item() == pytest.approx(5**0.5)
    assert xs[0].tolist() == [4.0, -2.0]
    for out in (0, 1):
        both = lists()
        amp_C.multi_tensor_axpby(65536, new_flag(), [*both, both[out]], 2.0, 0.5, -1)
        assert [one.flatten().tolist() for one in both[out]] == [[17.0, -12.0], [2.25]]


@family
@pytest.mark.parametrize("per_tensor", [None, False])
def test_norms_per_tensor_are_empty_unless_asked_for(op: Any, per_tensor: bool | None) -> None:
    norm, each = op(new_flag(), [torch.tensor([3.0]), torch.tensor([4.0])], per_tensor)
    assert_same(norm, torch.tensor([5.0]))
    assert_same(each, torch.zeros(0))


# -- the flag --------------------------------------------------------------------------------------


@every_dtype
@pytest.mark.parametrize("value", BAD)
def test_a_bad_value_anywhere_sets_the_flag(dtype: torch.dtype, value: float) -> None:
    """And all results are written all the same."""
    shapes = [(5,), (0,), (2, 2)]
    for number, place in ((0, 0), (0, 4), (2, 3)):
        xs, ys, flag = random_list(shapes, dtype), random_list(shapes, torch.float32, 1), new_flag()
        xs[number].view(-1)[place] = value
        outs = [torch.full_like(x, 7.0) for x in xs]
        amp_C.multi_tensor_scale(65536, flag, [xs, outs], 0.5)
        assert flag.item() == 1
        for x, out in zip(xs, outs, strict=True):
            assert_same(out, (x.double() * 0.5).to(dtype))
        for op in FAMILY.values():
            flag = new_flag()
            norm, each = op(flag, xs, True)
            assert flag.item() == 1
            assert not norm.isfinite()
            assert (~each.isfinite()).nonzero().tolist() == [[number]]
        for checked in (-1, 0, 1):
            for bad, pair in enumerate(([xs, ys], [ys, xs])):
                flag = new_flag()
                amp_C.multi_tensor_axpby(65536, flag, [*pair, outs], 1.0, 1.0, checked)
                assert flag.item() == (checked in (-1, bad))
                assert [out.isfinite().all().item() for out in outs].count(False) == 1


def test_what_comes_back_into_the_range_or_leaves_it_is_no_overflow() -> None:
    flag, large = new_flag(), [torch.full((100,), 2.0**80)]
    norm, _ = amp_C.multi_tensor_unscale_l2norm(65536, flag, [large], torch.tensor([2.0**-40]))
    assert (norm.item(), flag.item()) == (10 * 2.0**40, 0)
    out = torch.zeros(1, dtype=torch.float16)
    amp_C.multi_tensor_scale(65536, flag, [[torch.tensor([6e4])], [out]], 2.0)
    assert (flag.item(), out.item()) == (0, math.inf)


def test_the_flag_is_never_reset_and_only_the_mp_norm_looks_at_it() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([math.nan])]
    for name, op in FAMILY.items():
        flag = new_flag(1)
        norm, each = op(flag, tensors[:1], True)
        assert [norm.item(), *each.tolist()] == ([0.0, 0.0] if name == "l2norm_mp" else [3.0, 3.0])
        assert flag.item() == 1
    norm, each = amp_C.multi_tensor_l2norm_mp(65536, new_flag(1), [tensors], True)
    assert [norm.item(), *each.tolist()] == [0.0, 0.0, 0.0]
    for op, count, args in (
        (amp_C.multi_tensor_scale, 2, (1.0,)),
        (amp_C.multi_tensor_axpby, 3, (1.0, 1.0, -1)),
    ):
        flag = new_flag(1)
        op(65536, flag, [[torch.ones(3)] for _ in range(count)], *args)
        assert flag.item() == 1


# -- the scale with hysteresis, against the rule in plain Python -----------------------------------


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
    st.sampled_from([1.0, 65536.0, 2.0**127]),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(st.sampled_from([0.0, 1.0, 3.0]), max_size=20),
)
@example(2.0**-148, 1, 1, [1.0, 1.0])  # there is no floor
@example(2.0**127, 1, 1, [0.0])  # and no infinite scale
def test_a_run_follows_the_rule(
    start: float, interval: int, hysteresis: int, overflows: list[float]
) -> None:
    state = (start, 0, hysteresis)
    scale = torch.tensor([start])
    clean, tolerated = (torch.tensor([n], dtype=torch.int32) for n in (0, hysteresis))
    for found_inf in overflows:
        state = model(state, found_inf, interval, hysteresis)
        state = (torch.tensor(state[0]).item(), *state[1:])
        returned = amp_C.update_scale_hysteresis(
            scale, clean, tolerated, torch.tensor([found_inf]), 2.0, 0.5, interval, hysteresis
        )
        assert returned is scale
        assert (scale.item(), clean.item(), tolerated.item()) == state


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
