# SPDX-License-Identifier: BSD-3-Clause
"""Weights that several optimizers update, and gradients that only the model's side can drop."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import EXACT, WITH_MASTERS
from cases.models import Damage, Parts
from cases.pair import Pair, sgd
from cases.tolerances import assert_same

levels = pytest.mark.parametrize("level", EXACT)
X = torch.tensor([[1.0, 2.0, -1.0], [2.0, 0.0, 1.0]])


def two_optimizers(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Both update the whole model, with different rules."""
    params = list(model.parameters())
    return [
        torch.optim.SGD(params, lr=0.5, momentum=0.9),
        torch.optim.Adam(params, lr=0.05, eps=1e-4),
    ]


@levels
def test_two_optimizers_of_one_model_see_one_gradient(level: str) -> None:
    """As in plain torch: each step uses the gradient, and zeroing by either ends it."""
    model = Parts()
    plain = copy.deepcopy(model)
    ours, theirs = two_optimizers(model), two_optimizers(plain)
    preamp.initialize(model, ours, opt_level=level, loss_scale=128.0, verbosity=0)
    for step in range(4):
        for part in "ab" if step % 2 else "ba":
            loss = model(X, part).float().sum() / 8
            with preamp.scale_loss(loss, ours) as scaled:
                scaled.backward()
            (plain(X, part).sum() / 8).backward()
        for optimizer, other in zip(ours, theirs, strict=True):
            optimizer.step()
            with preamp.disable_casts():
                other.step()
        ours[step % 2].zero_grad()
        theirs[0].zero_grad()
        for mine, wanted in zip(preamp.master_params(ours[0]), plain.parameters(), strict=True):
            assert_same(mine.detach(), wanted.detach(), f"step {step}")
    engine = preamp.engine_of(model)
    firsts, seconds = map(preamp.master_params, ours)
    assert all(a is b for a, b in zip(firsts, seconds, strict=True))
    engine.close()
    for optimizer in ours:
        own = optimizer.param_groups[0]["params"]
        assert all(a is b for a, b in zip(own, model.parameters(), strict=True))
        assert all(param in optimizer.state for param in model.parameters())


@levels
def test_an_exception_restores_a_shared_gradient_once(level: str) -> None:
    model = Parts()
    ours = two_optimizers(model)
    preamp.initialize(model, ours, opt_level=level, loss_scale=128.0, verbosity=0)
    with preamp.scale_loss(model(X).float().sum() / 8, ours) as scaled:
        scaled.backward()
    before = [param.grad.clone() for param in preamp.master_params(ours[0])]

    def fail() -> None:
        with preamp.scale_loss(model(X).float().sum(), ours) as scaled:
            scaled.backward()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    for param, grad in zip(preamp.master_params(ours[0]), before, strict=True):
        assert_same(param.grad, grad)


def drop_by_module(model: nn.Module) -> None:
    model.zero_grad()


def zero_by_module(model: nn.Module) -> None:
    model.zero_grad(set_to_none=False)


def drop_each(model: nn.Module) -> None:
    for param in model.parameters():
        param.grad = None


@levels
@pytest.mark.parametrize("drop", [drop_by_module, zero_by_module, drop_each])
def test_dropping_the_models_gradients_reaches_parts_unused_last(
    level: str, drop: Callable[[nn.Module], Any]
) -> None:
    """Part a has its gradient from an earlier backward than the latest."""
    pair = Pair(level, sgd, loss_scale=128.0)
    pair.backward(0, "a")
    pair.backward(1, "b")
    pair.check_grads()
    drop(pair.model)
    drop(pair.plain)
    pair.check_grads()
    pair.backward(2, "b")
    pair.check_grads()
    pair.step()
    pair.check()


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_the_cause_and_the_scale_are_those_of_the_loss_that_overflowed(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Loss 0 is clean, loss 1 overflows: its scaler is halved, told of and checked for limits."""
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    preamp.initialize(
        model, optimizer, opt_level=level, loss_scale="dynamic", num_losses=2, verbosity=0
    )
    engine = preamp.engine_of(model)
    engine.verbosity = 1
    engine.scaler(0).set_scale(4.0)
    engine.scaler(1).set_scale(2.0**-23)
    with preamp.scale_loss(model(X, "a").float().sum(), optimizer, loss_id=0) as scaled:
        scaled.backward()
    damage = Damage(model.b.weight, float("inf"))
    damage.armed = True
    with preamp.scale_loss(model(X, "b").float().sum(), optimizer, loss_id=1) as scaled:
        scaled.backward()
    with pytest.raises(preamp.LossScaleError, match=r"2\*\*-24"):
        optimizer.step()
    (cause,) = engine.overflow_causes
    assert (cause.loss_id, cause.old_scale, cause.new_scale) == (1, 2.0**-23, 2.0**-24)
    assert cause.parameters == ("b.weight",)
    assert engine.loss_scale(0) == 4.0
    assert f"loss scaler 1 reducing loss scale to {2.0**-24}" in capsys.readouterr().out


@levels
def test_an_overflow_names_a_shared_weight_once(level: str) -> None:
    model = Parts()
    ours = two_optimizers(model)
    preamp.initialize(model, ours, opt_level=level, loss_scale="dynamic", verbosity=0)
    with preamp.scale_loss(model(X, "a").float().sum() * float("inf"), ours) as scaled:
        scaled.backward()
    for optimizer in ours:
        optimizer.step()
    overflowed = {name for name, p in model.named_parameters() if p.grad is not None}
    for cause in preamp.engine_of(model).overflow_causes:
        assert len(cause.parameters) == len(set(cause.parameters))
        assert set(cause.parameters) <= overflowed
    assert len(preamp.engine_of(model).overflow_causes) == 2
