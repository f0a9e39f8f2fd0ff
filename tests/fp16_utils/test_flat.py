# SPDX-License-Identifier: BSD-3-Clause
"""What the flat FP16_Optimizer alone has: a buffer for each group, and early 2019."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from cases.models import loss_of, values
from cases.optimizers import MAIN
from fp16_utils.steps import HALVES, EarlyAdam, assert_bound, flat, parts, wrapped
from preamp.optimizers import FP16_Optimizer, FusedAdam

BUILDS: dict[str, Any] = {**{case.name: case.build for case in MAIN}, "early": EarlyAdam}
EACH = pytest.mark.parametrize("name", BUILDS)


OPTIONS: dict[str, Any] = {"lr": 0.125, "betas": (0.5, 0.75), "eps": 2.0**-10}


def test_any_fused_adam_follows_the_early_formula() -> None:
    _, plain = parts(lambda params: FusedAdam(params, **OPTIONS, eps_inside_sqrt=False))
    _, named = parts(lambda params: FusedAdam(params, **OPTIONS))
    for optimizer in (plain, named):
        loss = sum(p.float().square().sum() for g in optimizer.fp16_groups for p in g)
        optimizer.backward(loss)
        optimizer.step()
        assert all("step" in state for state in optimizer.state.values())
    assert torch.equal(flat(values(plain)), flat(values(named)))


def bert(kind: Any, dtype: torch.dtype, scaling: dict[str, Any], **options: Any) -> Any:
    """As scripts of early 2019 had it: weights decay, biases do not."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(dtype)
    named = list(net.named_parameters())
    groups = [
        {"params": [p for name, p in named if ("bias" in name) == is_bias], "weight_decay": decay}
        for is_bias, decay in ((False, 0.01), (True, 0.0))
    ]
    return net, FP16_Optimizer(kind(groups, **OPTIONS, **options), verbose=False, **scaling)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("scaling", [{"static_loss_scale": 128.0}, {"dynamic_loss_scale": True}])
@pytest.mark.parametrize("max_grad_norm", [0.0, 0.05])
def test_around_fused_adam_it_trains_as_the_formula_says(
    dtype: torch.dtype, scaling: dict[str, Any], max_grad_norm: float
) -> None:
    fused = bert(FusedAdam, dtype, scaling, bias_correction=False, max_grad_norm=max_grad_norm)
    formula = bert(EarlyAdam, dtype, scaling, max_grad_norm=max_grad_norm)
    for step in range(6):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(step)).to(dtype)
        for net, optimizer in (fused, formula):
            for group in optimizer.param_groups:
                group["lr"] = 0.125 / (1 + step)  # a schedule edits the groups in place
            loss = net(x).float().square().mean() * (float("inf") if step == 3 else 1.0)
            optimizer.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        assert fused[1].cur_scale == formula[1].cur_scale
    for mine, wanted in zip(fused[1].fp32_groups_flat, formula[1].fp32_groups_flat, strict=True):
        assert torch.allclose(mine, wanted, rtol=8 * 2.0**-23, atol=2.0**-22)


def test_a_norm_beyond_float32_skips_the_step() -> None:
    """As in 2019, though each scaled gradient is finite."""
    net, optimizer = bert(FusedAdam, torch.bfloat16, {"dynamic_loss_scale": True})
    before, scale = flat(values(optimizer)), optimizer.cur_scale
    for param in net.parameters():
        param.grad = torch.full_like(param, 3e38)
    optimizer.step()
    assert optimizer.cur_scale == scale / 2
    assert torch.equal(flat(values(optimizer)), before)


def test_a_closure_is_called_once_before_the_step() -> None:
    model, optimizer = parts(static_loss_scale=4.0)
    before = flat(values(optimizer))

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum(p.float().sum() for p in model.parameters())
        optimizer.backward(loss)
        return loss

    with torch.no_grad():
        loss = optimizer.step(closure)
    torch.testing.assert_close(loss, before.half().float().sum())
    assert torch.equal(flat(values(optimizer)), before - 1.0)


def test_loading_binds_parameters_that_were_given_other_data() -> None:
    model, optimizer = parts()
    state = copy.deepcopy(optimizer.state_dict())
    model.a.weight.data = torch.zeros(2, 3, dtype=torch.float16)
    optimizer.load_state_dict(state)
    assert_bound(model, optimizer)
    assert model.a.weight.any()


# -- odd gradients (A-32) ------------------------------------------------------------------------


@EACH
def test_a32_parameters_without_a_gradient_do_not_move(name: str) -> None:
    model, optimizer = parts(BUILDS[name], static_loss_scale=4.0)
    optimizer.step()  # without any gradient
    assert torch.equal(flat(values(model)), flat(values(parts()[0])))
    assert optimizer.cur_iter == 1
    optimizer.backward(loss_of([model], 0))
    optimizer.step()  # momentum and moments exist now
    optimizer.zero_grad()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.backward(model.a.weight.float().sum())
    optimizer.step()
    changed = {n for n, param in model.named_parameters() if not torch.equal(param, before[n])}
    assert changed == {"a.weight"}
    assert_bound(model, optimizer)


@EACH
def test_a32_empty_groups_and_empty_parameters(name: str) -> None:
    param = nn.Parameter(torch.ones(3).half())
    nothing = nn.Parameter(torch.ones(0).half())
    inner = BUILDS[name]([{"params": []}, {"params": [nothing, param]}])
    optimizer = FP16_Optimizer(inner, static_loss_scale=4.0)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.backward((param.float() ** 2).sum())
        optimizer.step()
    assert (param < 1).all()
    assert [master.numel() for master in optimizer.fp32_groups_flat] == [0, 3]


# -- what scripts look at ------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [0, None])
def test_fields(scale: Any) -> None:
    """A dynamic scale does not ask for the static one."""
    _, optimizer = wrapped("flat", dynamic_loss_scale=True, static_loss_scale=scale)
    assert (optimizer.cur_scale, optimizer.cur_iter) == (2.0**16, 0)
    assert (optimizer.last_overflow_iter, optimizer.scale_factor) == (-1, 2.0)
    assert (optimizer.scale_window, optimizer.dynamic_loss_scale) == (1000, True)
    _, optimizer = wrapped("flat", static_loss_scale=8)
    assert (optimizer.cur_scale, optimizer.dynamic_loss_scale) == (8.0, False)
    assert optimizer.param_groups is optimizer.optimizer.param_groups
    assert optimizer.state is optimizer.optimizer.state
