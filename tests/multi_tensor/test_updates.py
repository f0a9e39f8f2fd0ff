# SPDX-License-Identifier: BSD-3-Clause
"""``multi_tensor_adam`` and its capturable forms, ``multi_tensor_sgd``, ``multi_tensor_lamb``."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases.selection import examples
from cases.tolerances import assert_same
from kit.refusals import refused
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


# -- sgd --------------------------------------------------------------------------------------


F16, BF16, F32, F64 = DTYPES
SIGNATURES = [
    (F16, F16, F16),
    (BF16, BF16, BF16),
    (F32, F32, F32),
    (F64, F64, F64),
    (F16, F32, F32, F16),
    (BF16, F32, F32, BF16),
    (F32, F32, F32, F16),
    (F32, F32, F32, BF16),
]
flags = st.booleans()


@pytest.mark.parametrize("kinds", SIGNATURES, ids=lambda kinds: "-".join(map(str, kinds)))
@settings(max_examples=examples(20))
@given(
    shapes=shapes,
    seed=seeds,
    layout=layouts,
    wd=st.sampled_from([0.0, 0.1]),
    momentum=st.sampled_from([0.0, 0.9]),
    dampening=st.sampled_from([0.0, 0.3]),
    nesterov=flags,
    first_run=flags,
    wd_after_momentum=flags,
    scale=st.sampled_from([1.0, 0.5, 1 / 3]),
)
def test_sgd(kinds: Any, shapes: Any, seed: int, layout: str, scale: float, **options: Any) -> None:
    lists = [random_list(shapes, kind, seed + n, layout=layout) for n, kind in enumerate(kinds)]
    grads, params, buffers = lists[:3]
    wd, momentum, dampening, *booleans = options.values()
    arguments = (wd, momentum, dampening, 0.1, *booleans, scale)
    rows = zip(*map(in_float64, lists[:3]), strict=True)
    exact = [oracles.sgd(*row, *arguments) for row in rows]
    before = copies(grads)
    amp_C.multi_tensor_sgd(65536, new_flag(), lists, *arguments)
    for ours, wanted in zip((params, buffers), zip(*exact, strict=True), strict=True):
        assert_near(ours, wanted, math=math_of(kinds[1]))
    for ours, was in zip(grads, before, strict=True):
        assert_same(ours, was)
    for half, param in zip(*lists[3:], params if len(kinds) == 4 else [], strict=False):
        assert_same(half, param.to(half.dtype))


def other_signatures() -> list[tuple[torch.dtype, ...]]:
    every = [*itertools.product(DTYPES, repeat=3), *itertools.product(DTYPES, repeat=4)]
    return [kinds for kinds in every if kinds not in SIGNATURES]


def test_sgd_refuses_every_other_signature() -> None:
    for kinds in other_signatures():
        lists = [[torch.ones(1, dtype=kind)] for kind in kinds]
        names = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
        # What a call may change are its lists; to look at all of torch too takes far longer.
        with refused("multi_tensor", "sgd, another signature", changes=True, dtypes=names):
            amp_C.multi_tensor_sgd(
                1, new_flag(), lists, 0.0, 0.0, 0.0, 0.1, False, False, False, 1.0
            )
        assert all(tensor.item() == 1 for (tensor,) in lists)


# -- lamb -------------------------------------------------------------------------------------


kinds_of_lists = st.tuples(dtypes, dtypes, dtypes, dtypes)
ULPS = 512
"""Norms, their quotient and the quotient in the update: more roundings than in Adam."""

options_of_lamb = st.fixed_dictionaries(
    {
        "step": st.sampled_from([1, 2, 1000]),
        "bias_correction": st.sampled_from([0, 1]),
        "wd": st.sampled_from([0.0, 0.1]),
        "averaging": st.sampled_from([0, 1]),
        "mode": st.sampled_from([0, 1]),
        "norm": st.sampled_from([0.5, 4.0]),
        "largest": st.sampled_from([0.0, 1.0, 100.0]),
        "nvlamb": st.booleans(),
    }
)
BETAS_AND_EPS = (0.9, 0.99, 1e-3)


def lamb_lists(
    shapes: Any, kinds: tuple[torch.dtype, ...], seed: int = 0, layout: str = "contiguous"
) -> Lists:
    return [
        random_list(shapes, kind, seed + n, layout=layout, positive=n == 3)
        for n, kind in enumerate(kinds)
    ]


def exact_lamb_step(lists: Lists, o: dict[str, Any]) -> list[Any]:
    """Updates, parameters and both moments after one step, in float64."""
    results = []
    for g, p, m, v in zip(*map(in_float64, lists), strict=True):
        u, m, v = oracles.lamb_update(
            g, p, m, v, *BETAS_AND_EPS, o["step"], o["bias_correction"], o["wd"],
            o["averaging"], o["mode"], o["norm"], o["largest"],
        )  # fmt: skip
        results.append((u, oracles.lamb_apply(p, u, 0.1, o["wd"], o["nvlamb"]), m, v))
    return [list(column) for column in zip(*results, strict=True)]


def assert_step(lists: Lists, exact: list[Any]) -> None:
    for ours, wanted in zip(lists, exact, strict=True):
        assert_near(ours, wanted, ulps=ULPS)


@settings(max_examples=examples(80))
@given(shapes, kinds_of_lists, seeds, layouts, options_of_lamb)
def test_lamb(shapes: Any, kinds: Any, seed: int, layout: str, options: dict[str, Any]) -> None:
    lists, o, flag = lamb_lists(shapes, kinds, seed, layout), options, new_flag(1)
    if seed % 4 == 0:
        lists[1][0].zero_()  # a norm of 0 makes the rate lr
    exact = exact_lamb_step(lists, o)
    amp_C.multi_tensor_lamb(
        65536, flag, lists, 0.1, *BETAS_AND_EPS, o["step"], o["bias_correction"], o["wd"],
        o["averaging"], o["mode"], torch.tensor([o["norm"]]), o["largest"], o["nvlamb"],
    )  # fmt: skip
    assert_step(lists, exact)
    assert flag.item() == 1  # neither read nor set
