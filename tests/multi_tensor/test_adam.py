# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_adam``, its capturable forms, and the Adam of 2018."""

from __future__ import annotations

import re
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


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_adam_is_torchs(kind: Any) -> None:
    params = [torch.nn.Parameter(p) for p in random_list([(3,), (2, 2)], torch.float64)]
    optimizer = kind(params, lr=0.05, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    ours = [p.detach().clone() for p in params]
    moments = [[torch.zeros_like(p) for p in ours] for _ in range(2)]
    mode = int(kind is torch.optim.AdamW)
    for step in range(1, 6):
        grads = random_list([(3,), (2, 2)], torch.float64, step)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        optimizer.step()
        lists = [grads, ours, *moments]
        amp_C.multi_tensor_adam(65536, new_flag(), lists, 0.05, 0.8, 0.9, 1e-6, step, mode, 1, 0.1)
    for param, value in zip(params, ours, strict=True):
        torch.testing.assert_close(value, param.detach(), rtol=1e-12, atol=1e-14)


@pytest.mark.apex("8 multi_tensor_adam_capturable")
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


@pytest.mark.apex("8 multi_tensor_adam_capturable")
@pytest.mark.parametrize("masters", [False, True])
def test_a_set_flag_stops_capturable_adam(masters: bool) -> None:
    lists = lists_for([(3,), ()], torch.float16, torch.float16)
    lists += [random_list([(3,), ()], torch.float32)] if masters else []
    lists[0][0][1] = torch.nan
    before = [copies(tensors) for tensors in lists]
    name = "multi_tensor_adam_capturable" + ("_master" if masters else "")
    options = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "step": 1, "mode": 1}
    arguments = on_device({**options, "bias_correction": 1, "wd": 0.1})
    getattr(amp_C, name)(65536, new_flag(1), lists, *arguments, torch.tensor([0.5]))
    for ours, old in zip(lists, before, strict=True):
        for tensor, was in zip(ours, old, strict=True):
            assert_same(tensor, was)


@pytest.mark.apex("8 multi_tensor_adam_capturable", "10 A-16")
def test_a16_capturable_adam_stores_moments_in_float32() -> None:
    grad, param = torch.tensor([1.0]), torch.zeros(1, dtype=torch.float16)
    m, v = torch.zeros(1), torch.zeros(1)
    lists = [[grad.half()], [param], [m], [v]]
    lr, step = torch.tensor([0.1]), torch.tensor([1], dtype=torch.int32)
    amp_C.multi_tensor_adam_capturable(
        65536, new_flag(), lists, lr, 0.9, 0.999, 1e-8, step, 1, 1, 0.0, torch.ones(1)
    )
    assert m.item() == pytest.approx(0.1, rel=1e-6)
    assert m.item() != m.half().item()


@pytest.mark.parametrize("beta", [0.9, 0.999, 0.99999])
def test_corrections_on_the_device_keep_their_digits(beta: float) -> None:
    """After one step from zero both corrected moments are exact: the step is lr."""
    grad, param = torch.tensor([0.5]), torch.zeros(1)
    lists = [[grad], [param], [torch.zeros(1)], [torch.zeros(1)]]
    lr, step = torch.tensor([1.0]), torch.tensor([1], dtype=torch.int32)
    amp_C.multi_tensor_adam_capturable(
        65536, new_flag(), lists, lr, beta, beta, 0.0, step, 1, 1, 0.0, torch.ones(1)
    )
    assert param.item() == pytest.approx(-1.0, rel=1e-6)


@pytest.mark.apex("8 multi_tensor_adam", "10 A-15")
@pytest.mark.parametrize("which", [2, 3])
def test_a15_half_moments_are_refused(which: int) -> None:
    lists = lists_for([(3,)], torch.float16, torch.float16)
    lists[which] = [tensor.half() for tensor in lists[which]]
    name = ("exp_avgs", "exp_avg_sqs")[which - 2]
    text = (
        f"multi_tensor_adam: {name} are float16. They are float32 for float16 params. "
        "Convert them with .to(torch.float32) after loading a checkpoint."
    )
    before = copies(lists[1])
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        amp_C.multi_tensor_adam(65536, new_flag(), lists, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)
    assert_same(lists[1][0], before[0])


def test_an_unknown_mode_is_refused() -> None:
    lists = lists_for([(3,)], torch.float32, torch.float32)
    text = (
        "multi_tensor_adam: mode is 2. 0 is L2 regularisation, 1 is decoupled decay. "
        "Pass 1 for the method called AdamW."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        amp_C.multi_tensor_adam(65536, new_flag(), lists, 0.1, 0.9, 0.99, 1e-8, 1, 2, 1, 0.0)


@pytest.mark.parametrize("name", ["lr", "step", "inv_scale"])
def test_numbers_where_tensors_belong_are_refused(name: str) -> None:
    lists = lists_for([(3,)], torch.float32, torch.float32)
    scalars = {
        "lr": torch.tensor([0.1]),
        "step": torch.tensor([1], dtype=torch.int32),
        "inv_scale": torch.ones(1),
    }
    dtype = "int32" if name == "step" else "float32"
    scalars[name] = 1  # type: ignore[assignment]
    text = (
        f"multi_tensor_adam_capturable: {name} is an int. {name} is a contiguous {dtype} tensor "
        f"with numel 1 on cpu. Make it with torch.zeros(1, dtype=torch.{dtype}, device='cpu')."
    )
    with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
        amp_C.multi_tensor_adam_capturable(
            65536, new_flag(), lists, scalars["lr"], 0.9, 0.99, 1e-8, scalars["step"], 1, 1, 0.0,
            scalars["inv_scale"],
        )  # fmt: skip


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


def test_early_adam_without_bias_correction_is_todays() -> None:
    one, two = (lists_for([(5,), ()], torch.float32, torch.float32) for _ in range(2))
    early_lists = [two[1], two[2], two[3], two[0]]
    amp_C.multi_tensor_adam(65536, new_flag(), one, 0.1, 0.9, 0.99, 1e-8, 3, 1, 0, 0.1)
    fused_adam_cuda.adam_mt(65536, new_flag(), early_lists, 0.1, 0.9, 0.99, 1e-8, 1.0, 3, 1, 0, 0.1)
    for ours, theirs in zip(one, two, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert_same(a, b)


@pytest.mark.apex("8 fused_adam_cuda.adam")
@pytest.mark.parametrize(
    ("kinds", "eps_mode", "text"),
    [
        (
            (torch.float16, torch.float16),
            1,
            "adam_mt: the lists are float16, float32, float32, float16. params and moments are "
            "float32, or all float64; grads and outputs are the same or float16 or bfloat16. "
            "Keep float32 masters of half parameters.",
        ),
        (
            (torch.float64, torch.float32),
            1,
            "adam_mt: the lists are float32, float32, float32, float64. params and moments are "
            "float32, or all float64; grads and outputs are the same or float16 or bfloat16. "
            "Keep float32 masters of half parameters.",
        ),
        (
            (torch.float16, torch.float32),
            2,
            "adam_mt: eps_mode is 2. 0 adds eps inside the root, 1 outside. "
            "Pass 1 for the published method.",
        ),
    ],
)
def test_what_early_adam_refuses(kinds: Any, eps_mode: int, text: str) -> None:
    grads, params, m, v = lists_for([(2,)], *kinds)
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        fused_adam_cuda.adam_mt(
            1, new_flag(), [params, m, v, grads], 0.1, 0.9, 0.99, 1e-8, 1.0, 1, eps_mode, 1, 0.0
        )
