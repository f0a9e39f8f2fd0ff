# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_adam`` and its capturable forms."""

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
from preamp.compat.multi_tensor import amp_C
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
