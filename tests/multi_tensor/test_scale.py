# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_scale`` and ``multi_tensor_axpby``."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from cases.selection import examples
from cases.tolerances import assert_same
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

bad_values = st.sampled_from([math.inf, -math.inf, math.nan])
factors = st.sampled_from([0.0, 1.0, -0.5, 2.0**-16, 3.0, 0.1, 65536.0])


def with_one_bad(tensors: list[torch.Tensor], value: float, data: Any) -> None:
    """Write ``value`` somewhere."""
    places = [(i, j) for i, t in enumerate(tensors) for j in range(t.numel())]
    assume(places)
    which, place = data.draw(st.sampled_from(places))
    tensors[which].view(-1)[place] = value


@pytest.mark.apex("8 multi_tensor_scale")
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


@pytest.mark.apex("8 multi_tensor_scale")
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


@pytest.mark.apex("8 the flag is set, never reset")
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
    allowed = re.escape("scale is a number or a tensor of one element")
    with pytest.raises(RuntimeError, match=allowed):
        amp_C.multi_tensor_scale(65536, new_flag(), [[values], [values]], torch.ones(2))


# -- axpby -----------------------------------------------------------------------------------


@pytest.mark.apex("8 multi_tensor_axpby")
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


@pytest.mark.apex("8 multi_tensor_axpby")
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
