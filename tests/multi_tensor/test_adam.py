# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_adam``, its capturable forms, and the Adam of 2018."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.selection import examples
from cases.tolerances import assert_same
from multi_tensor import oracles
from multi_tensor.strategies import (
    DTYPES,
    assert_near,
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
from preamp.compat.multi_tensor import amp_C, fused_adam_cuda
from preamp.core.dtypes import math_dtype

Lists = list[list[torch.Tensor]]

settings_of_adam = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5), (0.95, 0.0)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "step": st.sampled_from([1, 2, 1000]),
        "mode": st.sampled_from([0, 1]),
        "bias_correction": st.sampled_from([0, 1]),
        "wd": st.sampled_from([0.0, 0.1]),
    }
)


def arguments(options: dict[str, Any]) -> tuple[Any, ...]:
    o = options
    return (
        o["lr"], *o["betas"], o["eps"], o["step"], o["mode"], o["bias_correction"], o["wd"],
    )  # fmt: skip


def lists_for(
    shapes: Any, grad: torch.dtype, param: torch.dtype, seed: int = 0, layout: str = "contiguous"
) -> Lists:
    wide = math_dtype(param)
    return [
        random_list(shapes, grad, seed, layout=layout),
        random_list(shapes, param, seed + 1, layout=layout),
        random_list(shapes, wide, seed + 2, layout=layout),
        random_list(shapes, wide, seed + 3, layout=layout, positive=True),
    ]


def exact_step(lists: Lists, options: dict[str, Any], factor: float = 1.0) -> list[Any]:
    """Parameters and both moments after one step, in float64."""
    rows = zip(*map(in_float64, lists), strict=True)
    results = [oracles.adam(g * factor, p, m, v, *arguments(options)) for g, p, m, v in rows]
    return [list(column) for column in zip(*results, strict=True)]


def on_device(options: dict[str, Any]) -> tuple[Any, ...]:
    """The arguments of the capturable forms, without the inverse scale."""
    lr, b1, b2, eps, step, *rest = arguments(options)
    return (torch.tensor([lr]), b1, b2, eps, torch.tensor([step], dtype=torch.int32), *rest)


@pytest.mark.apex("8 multi_tensor_adam")
@settings(max_examples=examples(30))
@given(shapes, dtypes, dtypes, seeds, layouts, settings_of_adam)
def test_adam(
    shapes: Any, grad: torch.dtype, param: torch.dtype, seed: int, layout: str, options: Any
) -> None:
    lists, flag = lists_for(shapes, grad, param, seed, layout), new_flag(1)
    exact, grads = exact_step(lists, options), copies(lists[0])
    amp_C.multi_tensor_adam(65536, flag, lists, *arguments(options))
    for ours, wanted in zip(lists[1:], exact, strict=True):
        assert_near(ours, wanted, math=math_of(grad, param))
    for ours, before in zip(lists[0], grads, strict=True):
        assert_same(ours, before)
    assert flag.item() == 1  # neither read nor set


@pytest.mark.apex("8 multi_tensor_adam_capturable", "10 A-16")
@settings(max_examples=examples(30))
@given(shapes, dtypes, dtypes, seeds, layouts, settings_of_adam, st.sampled_from([1.0, 2.0**-16]))
def test_capturable_adam(
    shapes: Any,
    grad: torch.dtype,
    param: torch.dtype,
    seed: int,
    layout: str,
    options: Any,
    inv_scale: float,
) -> None:
    lists = lists_for(shapes, grad, param, seed, layout)
    if grad is not torch.float16:
        lists[0] = [g / inv_scale for g in lists[0]]
    exact, grads = exact_step(lists, options, inv_scale), in_float64(lists[0])
    op = amp_C.multi_tensor_adam_capturable
    op(65536, new_flag(), lists, *on_device(options), torch.tensor([inv_scale]))
    for ours, wanted in zip(lists[1:], exact, strict=True):
        assert_near(ours, wanted)
    for ours, before in zip(lists[0], grads, strict=True):
        assert_same(ours, (before * inv_scale).to(grad))


@pytest.mark.apex("8 multi_tensor_adam_capturable_master")
@settings(max_examples=examples(25))
@given(shapes, dtypes, dtypes, seeds, layouts, settings_of_adam)
def test_capturable_adam_with_masters(
    shapes: Any, grad: torch.dtype, param: torch.dtype, seed: int, layout: str, options: Any
) -> None:
    grads, masters, *moments = lists_for(shapes, grad, torch.float32, seed, layout)
    params = [torch.zeros_like(master, dtype=param) for master in masters]
    exact = exact_step([grads, masters, *moments], options, 0.5)
    lists = [grads, params, *moments, masters]
    op = amp_C.multi_tensor_adam_capturable_master
    op(65536, new_flag(), lists, *on_device(options), torch.tensor([0.5]))
    for ours, wanted in zip([masters, *moments], exact, strict=True):
        assert_near(ours, wanted)
    for half, master in zip(params, masters, strict=True):
        assert_same(half, master.to(param))


# -- fused_adam_cuda -------------------------------------------------------------------------

early = st.fixed_dictionaries(
    {
        "lr": st.sampled_from([1e-3, 0.1]),
        "betas": st.sampled_from([(0.9, 0.999), (0.0, 0.5)]),
        "eps": st.sampled_from([1e-8, 1e-3]),
        "scale": st.sampled_from([1.0, 128.0, 3.0]),
        "step": st.sampled_from([1, 2, 1000]),
        "eps_mode": st.sampled_from([0, 1]),
        "bias_correction": st.sampled_from([0, 1]),
        "wd": st.sampled_from([0.0, 0.1]),
    }
)


def early_arguments(options: dict[str, Any]) -> tuple[Any, ...]:
    o = options
    return (
        o["lr"], *o["betas"], o["eps"], o["scale"], o["step"], o["eps_mode"],
        o["bias_correction"], o["wd"],
    )  # fmt: skip


@pytest.mark.apex("0 fused_adam_cuda", "8 fused_adam_cuda.adam_mt")
@settings(max_examples=examples(30))
@given(
    shapes,
    st.sampled_from([(d, torch.float32) for d in DTYPES[:3]] + [(torch.float64, torch.float64)]),
    st.sampled_from([None, *DTYPES[:2]]),
    seeds,
    layouts,
    early,
)
def test_early_adam_on_lists(
    shapes: Any, kinds: Any, output: torch.dtype | None, seed: int, layout: str, options: Any
) -> None:
    grads, params, m, v = lists_for(shapes, *kinds, seed, layout)
    lists = [params, m, v, grads]
    rows = zip(*map(in_float64, [grads, params, m, v]), strict=True)
    exact = [oracles.early_adam(*row, *early_arguments(options)) for row in rows]
    if output is not None:
        lists.append([torch.zeros_like(p, dtype=output) for p in params])
    fused_adam_cuda.adam_mt(65536, new_flag(), lists, *early_arguments(options))
    for ours, wanted in zip(lists[:3], zip(*exact, strict=True), strict=True):
        assert_near(ours, wanted, math=math_of(*kinds))
    for target, param in zip(*lists[4:], params if output else [], strict=False):
        assert_same(target, param.to(target.dtype))


@pytest.mark.apex("8 fused_adam_cuda.adam")
@pytest.mark.parametrize("grad", DTYPES[:3])
@pytest.mark.parametrize("has_output", [False, True])
def test_early_adam_on_one_parameter(grad: torch.dtype, has_output: bool) -> None:
    one, two = (lists_for([(5,)], grad, torch.float32) for _ in range(2))
    options = (0.1, 0.9, 0.99, 1e-8, 128.0, 3, 1, 0, 0.01)
    output = torch.zeros(5, dtype=torch.float16) if has_output else torch.tensor([])
    (g,), (p,), (m,), (v,) = one
    fused_adam_cuda.adam(p, output, m, v, g, *options)
    fused_adam_cuda.adam_mt(65536, new_flag(), [two[1], two[2], two[3], two[0]], *options)
    for ours, theirs in zip(one, two, strict=True):
        assert_same(ours[0], theirs[0])
    if has_output:
        assert_same(output, p.half())
