# SPDX-License-Identifier: BSD-3-Clause
"""What scripts see of gradients between ``scale_loss`` and ``step``, and may do to them."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
import preamp.optimizers
from cases.levels import BY_NAME, F32_WEIGHTS, LEVEL_NAMES, WITH_MASTERS
from cases.tolerances import assert_same
from kit.loops import begin, scaled_backward
from kit.pair import Pair, sgd
from kit.refusals import refused
from preamp.core.tensors import stored_grad

levels = pytest.mark.parametrize("level", LEVEL_NAMES)
with_masters = pytest.mark.parametrize("level", WITH_MASTERS)


# -- those of masters, which are made when somebody looks ------------------------------------------


@with_masters
def test_master_gradients_are_made_when_read(level: str) -> None:
    pair = Pair(level, loss_scale=1.0)
    pair.backward(0)
    assert set(map(stored_grad, pair.masters)) == {None}
    first = pair.masters[0]
    assert_same(first.grad, pair.plain_optimizer.param_groups[0]["params"][0].grad)
    assert None not in map(stored_grad, pair.masters)
    for param in (*pair.model.parameters(), *pair.plain.parameters()):
        param.grad.mul_(2.0)  # counts, as there is no loss scale
    pair.step()
    assert set(map(stored_grad, pair.masters)) == {None}
    assert all(master.grad is None for master in pair.masters)
    pair.check()


@with_masters
@pytest.mark.parametrize("zeroes", [False, True])
def test_master_gradient_is_not_there_inside_the_body(level: str, zeroes: bool) -> None:
    """It would be scaled and incomplete; what came before is there, until it is zeroed."""
    pair = Pair(level, loss_scale=128.0)
    pair.backward(0)
    with preamp.scale_loss(pair.loss(1), pair.optimizer) as scaled:
        if zeroes:
            pair.zero()
        scaled.backward()
        pair.check_grads()
    pair.theirs(1)
    pair.check_grads()


@levels
def test_master_params_without_initialize(level: str) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    assert [id(p) for p in preamp.master_params(optimizer)] == [id(p) for p in model.parameters()]
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0)
    wanted = torch.float16 if level == "O3" else torch.float32
    assert [p.dtype for p in preamp.master_params(optimizer)] == [wanted] * 2


# -- half ones, and what a script does to them -----------------------------------------------------


def refused_at(level: str, name: str) -> Any:
    half = str(BY_NAME[level].half).removeprefix("torch.")
    return refused("doors", name, changes=True, half=half)


WRITES: dict[str, Callable[[Any], object]] = {
    "value": lambda p: p.grad.clamp_(-64.0, 64.0),
    "norm asked for": lambda p: p.grad.mul_(1.0),
    "all but the largest": lambda p: p.grad.mul_(p.grad == p.grad.max()),
    "last element": lambda p: p.grad.view(-1)[-1:].mul_(0.5),
    "decay": lambda p: p.grad.add_(2.0**-20),
    "doubled": lambda p: p.grad.mul_(2.0),
    "clipped to nothing": lambda p: p.grad.mul_(-1e-38),  # the zeros have a sign
    "replaced": lambda p: setattr(p, "grad", p.grad * 2),
}
"""The first five leave nearly all values, or all, and the first ones and largest magnitude."""


def wide_pair(level: str, **options: Any) -> Any:
    """A weight of 4,096 elements whose gradient is small but for its last element, which is 1."""
    model = nn.Linear(4096, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = sgd(model.parameters())
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    inputs = torch.full((1, 4096), 2.0**-12)
    inputs[0, -1] = 1.0
    return model, optimizer, inputs


@with_masters
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("read", [False, True])
def test_any_write_to_scaled_gradients_is_refused(level: str, write: str, read: bool) -> None:
    model, optimizer, inputs = wide_pair(level, loss_scale=128.0)
    scaled_backward(model(inputs).sum(), optimizer)
    if read:
        assert [master.grad for master in preamp.master_params(optimizer)]
    WRITES[write](model.weight)
    with refused_at(level, "a write to scaled gradients"):
        optimizer.step()
    assert not model.weight.any()
    optimizer.zero_grad()
    scaled_backward(model(inputs).sum(), optimizer)
    lr = optimizer.param_groups[0]["lr"]
    optimizer.step()
    assert_same(model.weight.detach().float(), (-lr * inputs).to(model.weight.dtype).float())


@with_masters
def test_a_plain_backward_over_a_dropped_scaled_one_is_refused(level: str) -> None:
    pair = Pair(level, loss_scale=128.0)
    pair.backward(0)
    pair.model.zero_grad()
    pair.loss(1).backward()
    with pytest.raises(preamp.PreampStateError, match="call every backward inside scale_loss"):
        pair.optimizer.step()


# -- the wrong loss --------------------------------------------------------------------------------


@levels
@pytest.mark.parametrize("scale", ["dynamic", 128.0])
@pytest.mark.parametrize("earlier", [False, True])
def test_a_backward_of_the_loss_itself_is_refused(level: str, scale: Any, earlier: bool) -> None:
    pair = Pair(level, loss_scale=scale)
    if earlier:
        pair.backward(0)
    loss = pair.loss(1)
    with (
        refused("doors", "a backward of the loss", changes=True),
        preamp.scale_loss(loss, pair.optimizer),
    ):
        loss.backward()
    pair.check_grads()  # those from before
    pair.backward(2)
    pair.step()
    pair.check()


@levels
@pytest.mark.parametrize("scale", [None, "dynamic", 128.0])
def test_other_ways_to_use_what_the_block_yields_are_fine(level: str, scale: Any) -> None:
    pair = Pair(level, loss_scale=scale)
    with preamp.scale_loss(pair.loss(3), pair.optimizer) as scaled:
        params = [p for p in pair.model.parameters() if p.requires_grad]
        for param, grad in zip(params, torch.autograd.grad(scaled, params), strict=True):
            param.grad = grad
    pair.theirs(3)
    with preamp.scale_loss(pair.loss(0), pair.optimizer) as scaled:
        (scaled * 2).backward()
    for _ in range(2):
        pair.theirs(0)
    with preamp.scale_loss(pair.loss(1), pair.optimizer) as scaled:
        torch.autograd.backward([scaled], retain_graph=True)
        scaled.backward()
    for _ in range(2):
        pair.theirs(1)
    with preamp.scale_loss(pair.loss(2), pair.optimizer):
        pass  # no backward: no gradients either
    pair.check_grads()
    pair.step()
    pair.check()


def _plain_steps(pair: Pair, count: int) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for index in range(count):
            pair.loss(index).backward()
            pair.optimizer.step()
            pair.optimizer.zero_grad()
    return [str(warning.message) for warning in told]


@levels
def test_steps_without_any_scale_loss_are_warned_of_once(level: str) -> None:
    """Not after a block, nor at a static scale."""
    (text,) = _plain_steps(Pair(level, loss_scale="dynamic"), 3)
    assert "scale_loss" in text
    pair = Pair(level, loss_scale="dynamic")
    pair.optimizer.step()  # no gradients: nothing to scale
    pair.train(0)
    for quiet in (pair, Pair(level, loss_scale=1.0), Pair(level, loss_scale=128.0)):
        assert _plain_steps(quiet, 3) == []


# -- gradients with a history ----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph:UserWarning")
@pytest.mark.parametrize("level", F32_WEIGHTS)
def test_a_penalty_on_gradients_made_with_create_graph(level: str) -> None:
    """The gradient is unscaled as a function of the scaled one, not behind autograd's back."""
    weight = nn.Parameter(torch.tensor([0.5, -0.25]))
    optimizer = begin(level, [], torch.optim.SGD([weight], lr=0.5), loss_scale=128.0)
    with preamp.scale_loss((weight**2).sum(), optimizer) as scaled:
        torch.autograd.backward(scaled, inputs=[weight], create_graph=True)
    penalty = (weight.grad**2).sum()  # 4 w²
    optimizer.zero_grad()
    scaled_backward(penalty, optimizer)
    assert_same(weight.grad, 8 * weight.detach())
