# SPDX-License-Identifier: BSD-3-Clause
"""The ``multi_tensor_l2norm`` family."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.selection import examples
from cases.tolerances import assert_same
from multi_tensor.strategies import (
    DTYPES,
    assert_rounded,
    copies,
    dtypes,
    in_float64,
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


@pytest.mark.apex("8 multi_tensor_l2norm")
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


@pytest.mark.apex("8 multi_tensor_l2norm")
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


@pytest.mark.apex("8 multi_tensor_l2norm_mp")
def test_only_the_mp_norm_looks_at_the_flag() -> None:
    tensors = [torch.tensor([3.0]), torch.tensor([math.nan])]
    for name, op in FAMILY.items():
        flag = new_flag(1)
        norm, each = op(flag, tensors[:1], True)
        assert [norm.item(), *each.tolist()] == ([0.0, 0.0] if name == "l2norm_mp" else [3.0, 3.0])
        assert flag.item() == 1
    norm, each = amp_C.multi_tensor_l2norm_mp(65536, new_flag(1), [tensors], True)
    assert [norm.item(), *each.tolist()] == [0.0, 0.0, 0.0]


@pytest.mark.apex("8 multi_tensor_l2norm_scale")
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


@pytest.mark.apex("8 multi_tensor_unscale_l2norm")
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
