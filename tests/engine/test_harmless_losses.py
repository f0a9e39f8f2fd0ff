# SPDX-License-Identifier: BSD-3-Clause
"""Losses that are not finite, and who is told of them at which verbosity."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp
from cases.levels import WITH_MASTERS
from preamp.engine import Engine

Loss = Callable[[torch.Tensor, bool], torch.Tensor]


def all_ignored(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    return F.cross_entropy(y, torch.full((3,), -100 if is_bad else 1))


def hidden(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    zero = torch.zeros(3) if is_bad else torch.ones(3)
    ratio = zero / zero
    return torch.where(ratio == 1, y.square().mean(1), ratio).mean()


def of_nothing(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    return y.square().mean(1)[: 0 if is_bad else 3].mean()


def harmful(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    return y.square().mean() * (float("nan") if is_bad else 1.0)


def train(level: str, loss_of: Loss, *, steps: int = 4, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-4)
    preamp.initialize(model, optimizer, opt_level=level, **options)
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(2.0)
    for index in range(steps):
        step(engine, loss_of, is_bad=index > 1)
    return engine


def step(engine: Engine, loss_of: Loss, *, is_bad: bool = True) -> None:
    (model,), (optimizer,) = engine.models, engine.optimizers
    loss = loss_of(model(torch.ones(3, 4)).float(), is_bad)
    with preamp.scale_loss(loss, optimizer) as scaled:
        scaled.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
@pytest.mark.parametrize("loss_of", [all_ignored, hidden, of_nothing])
def test_nothing_is_said_of_a_loss_whose_gradients_are_finite(
    level: str, loss_of: Loss, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = train(level, loss_of)
    assert "nan" not in capsys.readouterr().out
    assert (engine.steps_skipped, engine.overflow_causes) == (0, [])


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_nothing_is_said_twice_of_a_loss_with_bad_gradients(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(level, harmful, steps=3, overflow="trace", verbosity=0)
    out = capsys.readouterr().out
    assert out.startswith("Gradient overflow.")
    assert out.count("overflow") == 1
    assert "in mul at " in out
    train(level, harmful, steps=3, verbosity=0)
    assert capsys.readouterr().out == ""


def test_tracing_that_was_asked_for_once_speaks_at_any_verbosity(
    capsys: pytest.CaptureFixture[str],
) -> None:
    engine = train("O2", harmful, steps=0, verbosity=0)
    for index in range(3):
        if index == 1:
            engine.trace_overflow()
        step(engine, harmful)
    out = capsys.readouterr().out
    assert out.count("Gradient overflow.") == 1
    assert "(step 2:" in out
    assert [cause.step for cause in engine.overflow_causes[-2:]] == [2, 3]


# -- what runs between a forward and its loss ------------------------------------------------------


@torch.no_grad()
def advantage(rewards: torch.Tensor) -> torch.Tensor:
    centered = rewards - rewards.mean()
    return centered / rewards.std(unbiased=False)


def weighted(y: torch.Tensor, is_bad: bool) -> torch.Tensor:
    rewards = torch.ones(3) if is_bad else torch.arange(3.0)
    return (y.square().mean(1) * advantage(rewards)).mean()


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_a_weight_that_the_program_computes_of_data(
    level: str, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = train(level, weighted, steps=3, overflow="trace", verbosity=0)
    trace = engine.overflow_causes[0].trace
    assert trace is not None
    assert (trace.phase, trace.operation, trace.output_found) == ("forward", "div", "nan")
    assert trace.where.endswith(f":{inspect.getsourcelines(advantage)[1] + 3}")
    assert trace.told() in capsys.readouterr().out


# -- derivatives of derivatives --------------------------------------------------------------------


class Critic(nn.Module):
    """Its derivative at zero is infinite, or finite with an infinite derivative of its own."""

    def __init__(self, power: float) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.power = power
        self.factor = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x) * self.factor
        squares = y.square().sum(1)
        if self.power == 0.5:
            return torch.sqrt(squares)
        return y.abs().pow(self.power).sum(1)


@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
@pytest.mark.parametrize(
    ("power", "operation", "line", "loss_is_finite"),
    [(0.5, "sqrt", 4, False), (1.5, "pow", 5, True)],
)
def test_a_penalty_names_the_function_whose_derivative_it_was(
    level: str, power: float, operation: str, line: int, loss_is_finite: bool
) -> None:
    torch.manual_seed(0)
    model = Critic(power)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0**-8)
    preamp.initialize(
        model, optimizer, opt_level=level, overflow="trace", loss_scale="dynamic", verbosity=0
    )
    engine = preamp.engine_of(optimizer)
    engine.scaler(0).set_scale(2.0)
    for factor in (1.0, 0.0):
        model.factor = factor
        x = torch.ones(3, 4, requires_grad=True)
        y = model(x).float()
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        norm = slope.square().sum(1)
        penalty = norm.add(1.0)
        loss = y.mean() + penalty.mean()
        with preamp.scale_loss(loss, optimizer) as scaled:
            scaled.backward()
        optimizer.step()
        optimizer.zero_grad()
    (cause,) = engine.overflow_causes
    assert cause.loss_was_finite is loss_is_finite
    assert cause.trace is not None
    assert (cause.trace.type, cause.trace.phase) == ("Critic", "backward")
    assert cause.trace.operation == operation
    assert cause.trace.where.endswith(f":{inspect.getsourcelines(Critic.forward)[1] + line}")
