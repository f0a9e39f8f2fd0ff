# SPDX-License-Identifier: BSD-3-Clause
"""Every class with every option, in every dtype, against its formula in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from cases.fused import (
    ADAM,
    DTYPES,
    FUSED,
    HALVES,
    MIXED_LAMB,
    VARIANTS,
    FusedCase,
    Options,
    Oracle,
    assert_close,
    gradients,
    parameters,
    variant_id,
    wide,
)
from preamp import optimizers

SHAPES = ((3, 2), (4,), (), (2, 0), (5, 3))
STEPS = 4
ABSENT = ((0, 1), (3, 4))  # at these steps this parameter has no gradient


def train(
    case: FusedCase, options: Options, dtype: torch.dtype, stored: torch.dtype | None = None
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
        for when, which in ABSENT:
            if step == when:
                grads[which] = None
        if step == 2:
            for group, own in zip(optimizer.param_groups, oracle.options, strict=True):
                own["lr"] = own["lr"] / 2
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].mul_(0.5)
                else:
                    group["lr"] /= 2
        for param, grad in zip(params, grads, strict=True):
            param.grad = None if grad is None else grad.clone()
        optimizer.step()
        oracle.step(grads)
        for param, grad in zip(params, grads, strict=True):
            assert grad is None or torch.equal(param.grad, grad)  # gradients survive the step
    return params, optimizer, oracle


@pytest.mark.apex(
    "7",
    "0 apex.optimizers.FusedSGD",
    "0 apex.optimizers.FusedAdam",
    "0 apex.optimizers.FusedNovoGrad",
    "0 apex.optimizers.FusedLAMB",
    "0 apex.optimizers.FusedAdagrad",
    "0 apex.optimizers.FusedMixedPrecisionLamb",
    "0 apex.contrib.optimizers.FusedLAMB",
    "0 apex.optimizers.FusedLARS",
    "7.0 other dtypes",
    "10 A-14",
)
@pytest.mark.parametrize("dtype", DTYPES, ids=variant_id)
@pytest.mark.parametrize(("case", "options"), VARIANTS, ids=variant_id)
def test_formula(case: FusedCase, options: Options, dtype: torch.dtype) -> None:
    params, optimizer, oracle = train(case, options, dtype)
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


@pytest.mark.apex("7")
@pytest.mark.parametrize("name", APEX_ORDER)
def test_arguments_may_be_passed_by_position_as_in_apex(name: str) -> None:
    signature = inspect.signature(getattr(optimizers, name))
    positional = [
        parameter.name
        for parameter in signature.parameters.values()
        if parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]
    assert positional == ["params", *APEX_ORDER[name].split()]


@pytest.mark.parametrize("dtype", DTYPES, ids=variant_id)
@pytest.mark.parametrize("case", FUSED, ids=variant_id)
def test_any_layout(case: FusedCase, dtype: torch.dtype) -> None:
    values = torch.randn(2, 3, 4, 4).to(dtype)
    grad = gradients([values.shape], 0, dtype)[0]
    options = {**case.needs, **case.variants[-1]}
    results = []
    for layout in ("plain", "channels_last", "strided"):
        param = torch.nn.Parameter(values.clone())
        if layout == "channels_last":
            param = torch.nn.Parameter(values.clone(memory_format=torch.channels_last))
        elif layout == "strided":
            base = torch.empty(2, 3, 4, 8, dtype=dtype)
            base[..., ::2] = values
            param = torch.nn.Parameter(base[..., ::2])
        stride = param.stride()
        optimizer = case.kind([param], **options)
        for _ in range(2):
            param.grad = grad.clone()
            optimizer.step()
        assert param.stride() == stride
        results.append(param.detach().clone().contiguous())
    for other in results[1:]:
        assert_close(other, results[0].double(), dtype, "layout")
