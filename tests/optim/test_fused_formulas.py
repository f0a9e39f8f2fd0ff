# SPDX-License-Identifier: BSD-3-Clause
"""Every class with every option, in every dtype, against its formula in float64."""

import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch

from cases.fused import (
    ADAM,
    HALVES,
    MIXED_LAMB,
    VARIANTS,
    FusedCase,
    Options,
    Oracle,
    assert_close,
    every_dtype,
    gradients,
    parameters,
    variant_id,
    wide,
)
from cases.host_reads import NoHostReads, far_from_the_host
from preamp import optimizers
from preamp.optimizers import FusedAdagrad, FusedAdam, FusedLARS, FusedSGD

SHAPES = ((3, 2), (4,), (), (2, 0), (5, 3))
STEPS = 4
ABSENT = {0: 1, 3: 4}  # at these steps this parameter has no gradient


def train(
    case: FusedCase,
    options: Options,
    dtype: torch.dtype,
    stored: torch.dtype | None = None,
    unread: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer, Oracle]:
    """Two groups of different hyper-parameters, a schedule, and gradients that come and go."""
    params = parameters(SHAPES, dtype)
    groups: list[tuple[list[Any], dict[str, Any]]] = [
        (params[:2], {}),
        (params[2:], {"lr": 0.02, "weight_decay": 0.25}),
    ]
    dicts = [{"params": own, **different} for own, different in groups]
    optimizer = case.kind(dicts, **{**case.needs, **options})
    oracle = Oracle(case, groups, options, dtype, stored)
    for step in range(STEPS):
        grads: list[Any] = list(gradients(SHAPES, step, dtype))
        if step in ABSENT:
            grads[ABSENT[step]] = None
        if step == 2:
            for group, own in zip(optimizer.param_groups, oracle.options, strict=True):
                own["lr"] = own["lr"] / 2
                group["lr"] *= 0.5  # a tensor in place
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        with unread():
            optimizer.step()
        oracle.step(grads)
        for param, grad in zip(params, grads, strict=True):
            assert grad is None or torch.equal(param.grad, grad)  # gradients survive the step
    return params, optimizer, oracle


@every_dtype
@pytest.mark.parametrize(("case", "options"), VARIANTS, ids=variant_id)
@pytest.mark.parametrize("far", [False, True], ids=["", "far from the host"])
def test_formula(
    case: FusedCase,
    options: Options,
    dtype: torch.dtype,
    far: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a device no step reads a value back to the host."""
    if far:
        far_from_the_host(monkeypatch)
    unread = NoHostReads if far else nullcontext
    params, optimizer, oracle = train(case, options, dtype, unread=unread)
    for index, (param, exact) in enumerate(zip(params, oracle.values, strict=True)):
        assert param.dtype is dtype
        assert_close(param, exact, dtype, f"parameter {index}")
        state = {key: s for key, s in optimizer.state[param].items() if key != "step"}
        assert state.keys() == oracle.state[index].keys()
        for key, value in state.items():
            kept = wide(dtype) if key in case.wide else dtype
            assert value.dtype is kept, key
            # Moments of squares are positive and cannot cancel.
            least = 0.0 if key in ("exp_avg_sq", "sum") else 1.0
            where = f"{key} of parameter {index}"
            assert_close(value, oracle.state[index][key], dtype, where, least)


def test_a_read_is_noticed() -> None:
    with pytest.raises(AssertionError, match="reads a value"), NoHostReads():
        bool(torch.ones(()) > 0)


def test_arguments_that_are_numbers_wait_for_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    far_from_the_host(monkeypatch)
    param = torch.nn.Parameter(torch.zeros(2))
    sgd, early = FusedSGD([param], lr=1.0), FusedAdam([param], max_grad_norm=1.0)
    param.grad = torch.ones(2)
    sgd.most_recent_scale = 4.0
    with NoHostReads():
        sgd.step()
    assert param.tolist() == [-0.25, -0.25]
    with NoHostReads():
        early.step()
    assert param.tolist() != [-0.25, -0.25]


@pytest.mark.parametrize("dtype", HALVES, ids=variant_id)
@pytest.mark.parametrize(
    ("case", "options"),
    [
        (ADAM, {"capturable": True, "master_weights": True}),
        (ADAM, {"capturable": True, "master_weights": True, "weight_decay": 0.1}),
        (MIXED_LAMB, {}),
        (MIXED_LAMB, {"use_nvlamb": True, "weight_decay": 0.0}),
    ],
    ids=variant_id,
)
def test_copies_in_full_precision(case: FusedCase, options: Options, dtype: torch.dtype) -> None:
    reduced = {"reduced_precision_dtype": dtype} if case is MIXED_LAMB else {}
    params, optimizer, oracle = train(case, {**options, **reduced}, dtype, torch.float32)
    for index, (param, exact) in enumerate(zip(params, oracle.values, strict=True)):
        master = optimizer.state[param]["master_param"]
        assert master.dtype is torch.float32
        assert_close(master, exact, torch.float32, f"copy {index}")
        assert torch.equal(param, master.to(dtype))


APEX_ORDER = {
    "FusedAdam": "lr bias_correction betas eps adam_w_mode weight_decay amsgrad set_grad_none "
    "capturable master_weights",
    "FusedLAMB": "lr bias_correction betas eps weight_decay amsgrad adam_w_mode grad_averaging "
    "set_grad_none max_grad_norm use_nvlamb",
    "FusedSGD": "lr momentum dampening weight_decay nesterov wd_after_momentum "
    "materialize_master_grads set_grad_none",
    "FusedNovoGrad": "lr bias_correction betas eps weight_decay amsgrad reg_inside_moment "
    "grad_averaging norm_type init_zero set_grad_none",
    "FusedAdagrad": "lr eps weight_decay set_grad_none adagrad_w_mode",
    "FusedMixedPrecisionLamb": "lr step bias_correction betas eps weight_decay amsgrad "
    "adam_w_mode grad_averaging max_grad_norm use_nvlamb reduced_precision_dtype",
    "FusedLARS": "lr momentum dampening weight_decay trust_coefficient eps nesterov "
    "wd_after_momentum materialize_master_grads set_grad_none",
}


@pytest.mark.parametrize("name", APEX_ORDER)
def test_arguments_may_be_passed_by_position_as_in_apex(name: str) -> None:
    found = inspect.signature(getattr(optimizers, name)).parameters.values()
    positional = [each.name for each in found if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert positional == ["params", *APEX_ORDER[name].split()]


# -- the same optimizer of torch, or a paper's own algorithm ----------------------------------


OWN_SHAPES = ((3, 2), (4,), ())
OWN_ADAM = {"lr": 0.05, "betas": (0.8, 0.9), "weight_decay": 0.1}


def trained(kind: Any, **options: Any) -> list[torch.Tensor]:
    params = parameters(OWN_SHAPES, torch.float64)
    optimizer = kind(params, **options)
    for step in range(6):
        for param, grad in zip(params, gradients(OWN_SHAPES, step, torch.float64), strict=True):
            param.grad = grad
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize(
    ("ours", "own", "theirs", "options"),
    [
        (FusedAdam, {}, torch.optim.AdamW, OWN_ADAM),
        (FusedAdam, {"adam_w_mode": False}, torch.optim.Adam, OWN_ADAM),
        (FusedAdam, {"capturable": True}, torch.optim.AdamW, OWN_ADAM),
        (FusedAdagrad, {}, torch.optim.Adagrad, {"lr": 0.1, "weight_decay": 0.1}),
        *(
            (FusedSGD, {}, torch.optim.SGD, options)
            for options in (
                {"lr": 0.1},
                {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
                {"lr": 0.1, "momentum": 0.9, "dampening": 0.5},
                {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
            )
        ),
    ],
)
def test_torch_computes_the_same(ours: Any, own: Options, theirs: Any, options: Options) -> None:
    for a, b in zip(trained(ours, **own, **options), trained(theirs, **options), strict=True):
        assert torch.allclose(a, b, rtol=1e-13, atol=1e-15)


def test_lars_leaves_the_ratio_out_for_skipped_groups() -> None:
    params = [torch.nn.Parameter(torch.tensor([3.0, 4.0])) for _ in range(2)]
    optimizer = FusedLARS(
        [{"params": params[:1]}, {"params": params[1:], "is_skipped": True}],
        lr=0.5,
        trust_coefficient=0.25,
    )
    for param in params:
        param.grad = torch.tensor([0.0, 2.0])
    optimizer.step()
    assert params[0].tolist() == [3.0, 4.0 - 0.5 * 0.25 * 5 / 2 * 2]
    assert params[1].tolist() == [3.0, 4.0 - 0.5 * 2]
