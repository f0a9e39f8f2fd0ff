# SPDX-License-Identifier: BSD-3-Clause
"""``clip_grad_norm_`` of all that torch's takes, and with every kind of norm."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import BY_NAME, LEVEL_NAMES
from cases.models import values
from cases.tolerances import assert_same
from kit.pair import Pair
from kit.refusals import assert_refused, refused

FORMS: dict[str, Callable[[Pair], Any]] = {
    "optimizer": lambda pair: pair.optimizer,
    "list": lambda pair: list(pair.model.parameters()),
    "generator": lambda pair: pair.model.parameters(),
    "masters": lambda pair: preamp.master_params(pair.optimizer),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_all_parameters_are_clipped_as_the_optimizer(level: str, form: str, order: float) -> None:
    pair, wanted = Pair(level), Pair(level)
    wanted.model.load_state_dict(pair.model.state_dict())
    for one in (pair, wanted):
        one.ours(0)
    norm = preamp.clip_grad_norm_(FORMS[form](pair), 0.25, order)
    assert_same(norm, preamp.clip_grad_norm_(wanted.optimizer, 0.25, order))
    assert norm.dtype is torch.float32
    for one in (pair, wanted):
        one.optimizer.step()
    for a, b in zip(values(pair.optimizer), values(wanted.optimizer), strict=True):
        assert_same(a, b)


@pytest.mark.parametrize("order", [2.0, math.inf])
@pytest.mark.parametrize("earlier", [0, 1], ids=["one backward", "two"])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_some_of_an_optimizer_are_clipped_and_no_others(
    level: str, earlier: int, order: float
) -> None:
    pair = Pair(level, loss_scale=64.0)
    for index in range(earlier + 1):
        pair.ours(index)
    masters = list(preamp.master_params(pair.optimizer))
    before = copy.deepcopy([master.grad for master in masters])
    if not earlier:  # reading the masters' gradients has made them; make them wait again
        pair.optimizer.zero_grad()
        pair.ours(0)
    params = list(pair.model.parameters())
    some = [0, len(params) - 1]
    norm = preamp.clip_grad_norm_((params[place] for place in some), 0.01, order)
    wide = [before[place].float() for place in some]  # type: ignore[union-attr]
    expected = torch.nn.utils.get_total_norm(wide, order)
    assert float(norm) == pytest.approx(float(expected), rel=1e-5)
    factor = min(1.0, 0.01 / (float(expected) + 1e-6))
    assert factor < 1
    for place, (master, grad) in enumerate(zip(masters, before, strict=True)):
        assert master.grad is not None
        assert grad is not None
        if place in some:
            torch.testing.assert_close(master.grad, grad * factor, rtol=2e-3, atol=1e-6)
        else:
            assert_same(master.grad, grad)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_one_tensor_and_a_frozen_one(level: str) -> None:
    pair = Pair(level)
    first, *_ = params = list(pair.model.parameters())
    pair.ours(0)
    alone = preamp.clip_grad_norm_([first], 1e9)
    assert_same(preamp.clip_grad_norm_(first, 1e9), alone)
    outside = nn.Parameter(torch.ones(3))  # without a gradient it adds nothing
    assert_same(preamp.clip_grad_norm_([first, outside], 1e9), alone)
    assert float(preamp.clip_grad_norm_(params, 1e9)) > float(alone)
    pair.optimizer.zero_grad()
    assert preamp.clip_grad_norm_(params, 1.0).item() == 0.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_two_optimizers_of_an_engine_are_clipped_as_one_vector(level: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizers = [torch.optim.SGD(part.parameters(), lr=1.0) for part in model]
    preamp.initialize(model, optimizers, opt_level=level, verbosity=0, loss_scale=8.0)
    with preamp.scale_loss(model(torch.ones(2, 4)).sum(), optimizers) as scaled:
        scaled.backward()
    norm = preamp.clip_grad_norm_(model.parameters(), 0.5)
    masters = [param for one in optimizers for param in preamp.master_params(one)]
    clipped = torch.cat([m.grad.flatten() for m in masters]).norm()  # type: ignore[union-attr]
    assert float(norm) > 1
    assert float(clipped) == pytest.approx(0.5, rel=1e-4)


def test_a_norm_that_is_not_finite_raises_where_asked_for() -> None:
    pair = Pair("O2")
    pair.overflow()
    with refused("clipping", "an infinite norm", pair.model):
        preamp.clip_grad_norm_(pair.model.parameters(), 1.0, error_if_nonfinite=True)
    assert not preamp.clip_grad_norm_(pair.model.parameters(), 1.0).isfinite()


STRAY = nn.Parameter(torch.ones(3))
STRAY.grad = torch.ones(3)
REFUSED: dict[str, Callable[[nn.Module, nn.Module], Any]] = {  # of two engines
    "models of two engines": lambda one, other: [*one.parameters(), *other.parameters()],
    "a parameter of no optimizer": lambda *_: nn.Parameter(torch.ones(3)),
    "one of no optimizer beside others": lambda one, _: [*one.parameters(), STRAY],
    "a generator that is used up": lambda *_: (param for param in ()),
    "a number": lambda *_: 1.0,
    "a list of a number": lambda *_: [1.0],
    "nothing": lambda *_: None,
    "a model": lambda one, _: one,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_clipped_is_refused(name: str) -> None:
    pairs = [Pair("O2"), Pair("O2")]
    for pair in pairs:
        pair.ours(0)
    models = [pair.model for pair in pairs]
    params = REFUSED[name](*models)
    assert_refused("clipping", name, lambda: preamp.clip_grad_norm_(params, 1.0), *models)


# -- every kind of norm, at every level, against float64 --------------------------------------


ORDERS = [0.5, 1, 2, 3, math.inf]


def exact_norm(grads: list[torch.Tensor], order: float) -> float:
    every = torch.cat([grad.detach().double().flatten() for grad in grads])
    return float(torch.linalg.vector_norm(every, order))


class Sums(nn.Module):
    """Its gradients are what it is called with, whatever its weights are."""

    def __init__(self, *values: torch.Tensor) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros_like(value) for value in values)

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.stack(
            [(w.float() * v.float()).sum() for w, v in zip(self.weights, values, strict=True)]
        ).sum()


def ones() -> list[torch.Tensor]:
    return [torch.ones(300, 300), torch.ones(7)]


def mixed() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(40, 30, generator=generator), torch.randn(11, generator=generator) * 100]
    # Small whole multiples of a power of two, which both half formats hold.
    return [(value * 16).round().clamp(-200, 200) / 16 for value in values]


def small() -> list[torch.Tensor]:
    return [torch.full((64, 64), 2.0**-14), torch.full((3,), 2.0**-10)]


# The norm does not depend on ``max_norm``, and a clip depends on gradients through the norm alone.
@pytest.mark.threes
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("kind", [ones, mixed, small])
@pytest.mark.parametrize("max_norm", [0.5, 1e9])
def test_norm_and_clipped_gradients(
    kind: Callable[[], list[torch.Tensor]], order: float, level: str, max_norm: float
) -> None:
    values = kind()
    model = Sums(*values)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=1.0)
    with preamp.scale_loss(model(*values), optimizer) as scaled:
        scaled.backward()
    expected = exact_norm(values, order)
    norm = preamp.clip_grad_norm_(optimizer, max_norm, norm_type=order)
    assert norm.dtype is torch.float32
    assert norm.shape == ()
    assert float(norm) == pytest.approx(expected, rel=1e-5)
    factor = min(1.0, max_norm / (expected + 1e-6))
    half = BY_NAME[level].half if level == "O3" else torch.float32
    for param, value in zip(preamp.master_params(optimizer), values, strict=True):
        assert param.grad is not None
        assert param.grad.dtype is half
        rounding = torch.finfo(half).eps
        found, wanted = param.grad.double(), value.double() * factor
        assert ((found - wanted).abs() <= wanted.abs() * rounding + 2.0**-25).all()


@pytest.mark.parametrize("order", ORDERS)
def test_float64_and_empty_gradients_beside_half_ones(order: float) -> None:
    weights = [
        nn.Parameter(torch.zeros(5, dtype=torch.float64)),
        nn.Parameter(torch.zeros(0, dtype=torch.float16)),
        nn.Parameter(torch.zeros(300, 300, dtype=torch.float16)),
    ]
    optimizer = torch.optim.SGD(weights, lr=1.0)
    model = nn.Linear(1, 1)
    preamp.initialize(model, optimizer, opt_level="O3", verbosity=0)
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    norm = preamp.clip_grad_norm_(optimizer, 1e9, norm_type=order)
    assert float(norm) == pytest.approx(exact_norm([torch.ones(90_005)], order), rel=1e-5)
