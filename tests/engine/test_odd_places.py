# SPDX-License-Identifier: BSD-3-Clause
"""Calls in places where nobody expects them: right numbers, or a refusal that says so."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import EXACT, F32_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from cases.models import Parts, values
from cases.tolerances import assert_same
from kit.compare import halves_match
from kit.pair import Pair

levels = pytest.mark.parametrize("level", EXACT)
with_masters = pytest.mark.parametrize("level", WITH_MASTERS)
X = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.0, 1.0]])
INSIDE = "was called inside a scale_loss block. Gradients are unscaled when the block ends"


# -- blocks and their scale ------------------------------------------------------------------


@levels
@pytest.mark.parametrize("inner", [1.0, float("inf")])
@pytest.mark.parametrize("growing", [False, True])
def test_a_block_keeps_the_scale_it_began_with(level: str, inner: float, growing: bool) -> None:
    """Another block of the same scaler ends in between, and halves or doubles the scale."""
    pairs = [Parts(0), Parts(1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in pairs]
    preamp.initialize(pairs, optimizers, opt_level=level, loss_scale="dynamic", verbosity=0)
    engine = preamp.engine_of(pairs[0])
    engine.scaler(0).set_scale(1024.0)
    engine.scaler(0).growth_tracker.fill_(1999 if growing else 0)
    with preamp.scale_loss(pairs[0](X).float().sum(), optimizers[0]) as outer:
        with preamp.scale_loss(pairs[1](X).float().sum() * inner, optimizers[1]) as scaled:
            scaled.backward()
        outer.backward()
    assert engine.loss_scale() == (512.0 if inner > 1 else 2048.0 if growing else 1024.0)
    plain = Parts(0)
    with preamp.disable_casts():
        plain(X).sum().backward()
    for param, wanted in zip(preamp.master_params(optimizers[0]), plain.parameters(), strict=True):
        assert_same(param.grad, wanted.grad)


@levels
def test_a_delayed_block_keeps_the_scale_it_began_with(level: str) -> None:
    pair = Pair(level, loss_scale="dynamic")
    with preamp.scale_loss(pair.loss(0), pair.optimizer, delay_unscale=True) as scaled:
        pair.engine.scaler(0).set_scale(64.0)
        scaled.backward()
    pair.theirs(0)
    pair.backward(1)
    pair.check_grads()


@pytest.mark.parametrize("level", [level for level in LEVEL_NAMES if level not in ("O0", "O4")])
@pytest.mark.parametrize(
    "call", [lambda o: o.step(), lambda o: preamp.clip_grad_norm_(o, 1.0)], ids=["step", "clip"]
)
def test_steps_and_clipping_inside_a_block_are_refused(
    level: str, call: Callable[[Any], Any]
) -> None:
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    before = values(model)
    with preamp.scale_loss(model(X).float().sum(), optimizer) as scaled:
        scaled.backward()
        with pytest.raises(preamp.PreampStateError, match=re.escape(INSIDE)):
            call(optimizer)
    for param, old in zip(values(model), before, strict=True):
        assert_same(param, old)
    optimizer.step()


# -- zeroing ---------------------------------------------------------------------------------


@with_masters
def test_reading_a_master_gradient_after_zeroing_inside_a_block(level: str) -> None:
    """It is not there yet; it must not be taken for an unscaled one."""
    pair = Pair(level, loss_scale=128.0)
    with preamp.scale_loss(pair.loss(0), pair.optimizer) as scaled:
        pair.optimizer.zero_grad()
        scaled.backward()
        assert [param.grad for param in preamp.master_params(pair.optimizer)] == [None] * 4
    pair.theirs(0)
    pair.check_grads()


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
@pytest.mark.parametrize("losses", ["other loss", "other scale"])
def test_optimizers_that_share_weights_share_delayed_gradients(level: str, losses: str) -> None:
    model, plain = Parts(), Parts()
    optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for lr in (0.5, 0.25)]
    preamp.initialize(model, optimizers, opt_level=level, num_losses=2, loss_scale=64, verbosity=0)
    with preamp.scale_loss(model(X).float().sum(), optimizers, delay_unscale=True) as scaled:
        scaled.backward()
    if losses == "other scale":
        preamp.engine_of(model).scaler(0).set_scale(32.0)
    loss_id = 1 if losses == "other loss" else 0
    with preamp.scale_loss(model(X).float().sum() * 2, optimizers, loss_id) as scaled:
        scaled.backward()
    with preamp.disable_casts():
        (plain(X).sum() * 3).backward()
    for optimizer in optimizers:
        for param, wanted in zip(preamp.master_params(optimizer), plain.parameters(), strict=True):
            assert_same(param.grad, wanted.grad)


# -- weights ---------------------------------------------------------------------------------


@with_masters
def test_weights_assigned_twice_reach_the_master(level: str) -> None:
    """The second tensor may come to lie where the first weight lay."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    for _ in range(20):
        optimizer.step()
        wanted = (model.weight.detach() * 0.5).clone()
        model.weight.data = wanted + 1
        model.weight.data = wanted.clone()
        optimizer.step()
        assert_same(model.weight.detach(), wanted)


class _Failing(torch.optim.Optimizer):
    """Updates its first parameter, then fails."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            param.sub_(param.grad)
            raise ArithmeticError


@with_masters
def test_a_step_that_fails_half_way_leaves_no_stale_half_weight(level: str) -> None:
    model = Parts()
    optimizer = _Failing(model.parameters())
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    with preamp.scale_loss(model(X).float().sum(), optimizer) as scaled:
        scaled.backward()
    with pytest.raises(ArithmeticError):
        optimizer.step()
    engine = preamp.engine_of(model)
    assert all(engine.master_of(param) is not None for param in model.parameters())
    assert halves_match(model)


@levels
def test_a_parameter_joins_without_the_scaled_gradient_it_had(level: str) -> None:
    """The blocks before did not know of it, so nobody has unscaled what it got."""
    model = Parts()
    optimizer = torch.optim.SGD(model.a.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale=64.0, verbosity=0)
    with preamp.scale_loss(model(X).float().sum(), optimizer) as scaled:
        scaled.backward()
    before = values(model.b)
    optimizer.add_param_group({"params": list(model.b.parameters())})
    optimizer.step()
    for param, old in zip(values(model.b), before, strict=True):
        assert_same(param, old)


# -- gradients with a history ----------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("level", F32_WEIGHTS)
def test_a_penalty_on_gradients_made_with_create_graph(level: str) -> None:
    """The gradient is unscaled as a function of the scaled one, not behind autograd's back."""
    weight = nn.Parameter(torch.tensor([0.5, -0.25]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    preamp.initialize([], optimizer, opt_level=level, loss_scale=128.0, verbosity=0)
    with preamp.scale_loss((weight**2).sum(), optimizer) as scaled:
        torch.autograd.backward(scaled, inputs=[weight], create_graph=True)
    penalty = (weight.grad**2).sum()  # 4 w²
    optimizer.zero_grad()
    with preamp.scale_loss(penalty, optimizer) as scaled:
        scaled.backward()
    assert_same(weight.grad, 8 * weight.detach())


# -- the end ---------------------------------------------------------------------------------


@levels
def test_large_earlier_gradients_survive_a_delayed_block(level: str) -> None:
    """Multiplied by the scale they would overflow in float16, and lose digits in bfloat16."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(model, optimizer, opt_level=level, loss_scale="dynamic", verbosity=0)
    for value, delay in ((0.875, False), (0.875, False), (2.0**-8, True), (2.0**-8, False)):
        loss = model(torch.ones(1, 1)).float().sum() * value
        with preamp.scale_loss(loss, optimizer, delay_unscale=delay) as scaled:
            scaled.backward()
    (param,) = preamp.master_params(optimizer)
    assert_same(param.grad, torch.tensor([[1.75 + 2.0**-7]]))
    assert preamp.engine_of(model).loss_scale() == 2.0**16
