# SPDX-License-Identifier: BSD-3-Clause
"""Steps of ``amp_C`` against the formulas of the fused optimizers in float64, one row each."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cases import fused
from cases.selection import examples
from cases.tolerances import assert_same
from kit.refusals import refused
from multi_tensor.strategies import (
    DTYPES,
    assert_near,
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

F16, BF16, F32, F64 = DTYPES
flags = st.booleans()


def choice(*values: Any) -> st.SearchStrategy[Any]:
    return st.sampled_from(values)


OPTIONS: dict[str, st.SearchStrategy[Any]] = {
    "lr": choice(1e-3, 0.1),
    "betas": choice((0.9, 0.999), (0.0, 0.5), (0.95, 0.0)),
    "eps": choice(1e-8, 1e-3),
    "step": choice(1, 2, 1000),
    "adam_w_mode": flags,
    "bias_correction": flags,
    "weight_decay": choice(0.0, 0.1),
    "inv_scale": choice(1.0, 2.0**-16, 0.5),
    "momentum": choice(0.0, 0.9),
    "dampening": choice(0.0, 0.3),
    "nesterov": flags,
    "first_run": flags,
    "wd_after_momentum": flags,
    "grad_averaging": flags,
    "norm": choice(0.5, 4.0),
    "max_grad_norm": choice(0.0, 1.0, 100.0),
    "use_nvlamb": flags,
}


def adam(o: Any) -> tuple[Any, ...]:
    given = (o["lr"], *o["betas"], o["eps"], o["step"])
    return (*given, int(o["adam_w_mode"]), int(o["bias_correction"]), o["weight_decay"])


def capturable(o: Any) -> tuple[Any, ...]:
    lr, b1, b2, eps, step, *rest = adam(o)
    steps = torch.tensor([step], dtype=torch.int32)
    return (torch.tensor([lr]), b1, b2, eps, steps, *rest, torch.tensor([o["inv_scale"]]))


def sgd(o: Any) -> tuple[Any, ...]:
    names = ("weight_decay", "momentum", "dampening", "lr", "nesterov", "first_run")
    return (*(o[name] for name in names), o["wd_after_momentum"], o["inv_scale"])


def lamb(o: Any) -> tuple[Any, ...]:
    given = (o["lr"], *o["betas"], o["eps"], o["step"], int(o["bias_correction"]))
    given += (o["weight_decay"], int(o["grad_averaging"]), int(o["adam_w_mode"]))
    return (*given, torch.tensor([o["norm"]]), o["max_grad_norm"], o["use_nvlamb"])


@dataclass(frozen=True)
class Step:
    """A step: its arguments and formula; ``state`` names its lists after the parameters.

    ``scales`` says whether gradients are divided on the way, ``keeps`` whether they stay as they
    are, and ``ulps`` how many roundings add up.
    """

    arguments: Callable[[Any], tuple[Any, ...]]
    rule: fused.Rule
    state: Sequence[str] = ("exp_avg", "exp_avg_sq")
    scales: bool = False
    keeps: bool = True
    ulps: float = 64.0


STEPS = {
    "multi_tensor_adam": Step(adam, fused.adam),
    "multi_tensor_adam_capturable": Step(capturable, fused.adam, scales=True, keeps=False),
    "multi_tensor_sgd": Step(sgd, fused.sgd, ("momentum_buffer",), scales=True),
    # Norms, their quotient and the quotient in the update: more roundings than in Adam.
    "multi_tensor_lamb": Step(lamb, fused.lamb, ulps=512.0),
}


def exact_step(row: Step, lists: Any, options: Any) -> list[list[torch.Tensor]]:
    """Parameters and state after one step, in float64."""
    factor = options["inv_scale"] if row.scales else 1.0
    results = []
    for g, p, *own in zip(*map(in_float64, lists), strict=True):
        is_first = row.rule is fused.sgd and options["first_run"]
        state = {} if is_first else dict(zip(row.state, own, strict=True))
        before = own[0]
        param = row.rule(options, options["step"], p, g * factor, state)
        if row.rule is fused.sgd and not options["momentum"]:
            state["momentum_buffer"] = before  # which it neither reads nor writes
        results.append([param, *(state[name] for name in row.state)])
    return [list(column) for column in zip(*results, strict=True)]


def updates_of_lamb(params: Any, ms: Any, vs: Any, o: Any) -> list[torch.Tensor]:
    """What takes the place of gradients."""
    c1, c2 = fused.corrections(o, o["step"])
    decay = o["weight_decay"] if o["adam_w_mode"] else 0.0
    rows = zip(params, ms, vs, strict=True)
    return [(m / c1) / ((v / c2).sqrt() + o["eps"]) + decay * p for p, m, v in rows]


def check(name: str, lists: Any, options: Any, flag: int = 0, masters: bool = False) -> None:
    """``masters``: the last list has what is updated, and the parameters are those rounded."""
    row, noop_flag = STEPS[name], new_flag(flag)
    updated = [lists[0], lists[-1], *lists[2:-1]] if masters else lists[: 2 + len(row.state)]
    exact, (grads, params) = exact_step(row, updated, options), map(in_float64, updated[:2])
    op = getattr(amp_C, name + "_master" * masters)
    op(65536, noop_flag, lists, *row.arguments(options))
    kinds = [tensors[0].dtype for tensors in updated[: 1 if row.rule is fused.sgd else 2]]
    math = math_of(*kinds) if row.keeps and row.ulps == 64.0 else F32
    for ours, wanted in zip(updated[1:], exact, strict=True):
        assert_near(ours, wanted, math=math, ulps=row.ulps)
    if row.rule is fused.lamb:
        assert_near(lists[0], updates_of_lamb(params, *exact[1:], options), ulps=row.ulps)
    else:
        for ours, before in zip(lists[0], grads, strict=True):
            factor = 1.0 if row.keeps else options["inv_scale"]
            assert_same(ours, (before * factor).to(ours.dtype))
    for copies in [lists[1]] if masters else lists[2 + len(row.state) :]:
        for half, param in zip(copies, updated[1], strict=True):
            assert_same(half, param.to(half.dtype))
    assert noop_flag.item() == flag


@pytest.mark.parametrize("name", ["multi_tensor_adam", "multi_tensor_adam_capturable"])
@pytest.mark.parametrize("masters", [False, True])
@settings(max_examples=examples(30))
@given(shapes, dtypes, dtypes, seeds, layouts, st.fixed_dictionaries(OPTIONS))
def test_adam(
    name: str, masters: bool, shapes: Any, grad: Any, param: Any, seed: int, layout: str, o: Any
) -> None:
    if masters and name == "multi_tensor_adam":
        return  # which has no such form
    wide = F32 if masters else math_dtype(param)
    kinds = [grad, F32 if masters else param, wide, wide]
    lists = [
        random_list(shapes, kind, seed + n, layout=layout, positive=n == 3)
        for n, kind in enumerate(kinds)
    ]
    if grad is not F16 and STEPS[name].scales:
        lists[0] = [g / o["inv_scale"] for g in lists[0]]
    if masters:
        lists = [lists[0], [p.to(param) for p in lists[1]], *lists[2:], lists[1]]
    check(name, lists, o, flag=int(not STEPS[name].scales), masters=masters)


SIGNATURES = [*((kind,) * 3 for kind in DTYPES), (F16, F32, F32, F16), (BF16, F32, F32, BF16)]
SIGNATURES += [(F32, F32, F32, F16), (F32, F32, F32, BF16)]


@pytest.mark.parametrize("kinds", SIGNATURES, ids=lambda kinds: "-".join(map(str, kinds)))
@settings(max_examples=examples(20))
@given(shapes, seeds, layouts, st.fixed_dictionaries(OPTIONS))
def test_sgd(kinds: Any, shapes: Any, seed: int, layout: str, o: Any) -> None:
    lists = [random_list(shapes, kind, seed + n, layout=layout) for n, kind in enumerate(kinds)]
    check("multi_tensor_sgd", lists, o | {"lr": 0.1})


def test_sgd_refuses_every_other_signature() -> None:
    every = [*itertools.product(DTYPES, repeat=3), *itertools.product(DTYPES, repeat=4)]
    for kinds in [kinds for kinds in every if kinds not in SIGNATURES]:
        lists = [[torch.ones(1, dtype=kind)] for kind in kinds]
        names = ", ".join(str(kind).removeprefix("torch.") for kind in kinds)
        arguments = (0.0, 0.0, 0.0, 0.1, False, False, False, 1.0)
        # What a call may change are its lists; to look at all of torch too takes far longer.
        with refused("multi_tensor", "sgd, another signature", changes=True, dtypes=names):
            amp_C.multi_tensor_sgd(1, new_flag(), lists, *arguments)
        assert all(tensor.item() == 1 for (tensor,) in lists)


@settings(max_examples=examples(80))
@given(shapes, st.tuples(*[dtypes] * 4), seeds, layouts, st.fixed_dictionaries(OPTIONS))
def test_lamb(shapes: Any, kinds: Any, seed: int, layout: str, o: Any) -> None:
    lists = [
        random_list(shapes, kind, seed + n, layout=layout, positive=n == 3)
        for n, kind in enumerate(kinds)
    ]
    if seed % 4 == 0:
        lists[1][0].zero_()  # a norm of 0 makes the rate lr
    options = o | {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-3}
    check("multi_tensor_lamb", lists, options, flag=1)
