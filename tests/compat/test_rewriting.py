# SPDX-License-Identifier: BSD-3-Clause
"""Half gradients written to after scale_loss: each sentence of the page on clipping."""

import math
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp import amp

Change = Callable[[nn.Module], object]

X = torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.0, -1.0]])
NO_EFFECT = "^The float16 gradient of '0.weight' was changed after scale_loss"


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def halve(model: nn.Module) -> None:
    for grad in grads(model):
        grad.mul_(0.5)


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.5


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 4.0)


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 8.0)


def clip_far(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def started(door: Any = amp, **options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)
    door.initialize(model, optimizer, opt_level="O2", verbosity=0, **options)
    return model, optimizer


def train(
    model: nn.Module, optimizer: Any, change: Change, steps: int = 3, micro: int = 1
) -> list[torch.Tensor]:
    for step in range(steps):
        for part in range(micro):
            loss = model(X * (1 + step + part)).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            change(model)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in amp.master_params(optimizer)]


def nothing(model: nn.Module) -> None:
    """What a script without such lines does."""


@pytest.mark.parametrize("change", [clip_far, halve, replace])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_script_that_writes_to_half_gradients_runs_on(change: Change, micro: int) -> None:
    """Told once, in its first step, and still after the steps that are watched."""
    run, plain = started(), started()
    with pytest.warns(UserWarning, match=NO_EFFECT) as caught:
        train(*run, change, 1, micro)
    assert len(caught) == 1
    train(*plain, nothing, 1, micro)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(*run, change, 20, micro)
    for ours, exact in zip(found, train(*plain, nothing, 20, micro), strict=True):
        assert_same(ours, exact)


def test_several_optimizers_warn_once() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.25) for part in model]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    with amp.scale_loss(model(X).square().mean(), optimizers) as scaled:
        scaled.backward()
    clip_far(model)
    with pytest.warns(UserWarning, match=NO_EFFECT):
        optimizers[0].step()
    optimizers[1].step()  # warnings are errors here


def take_step(
    door: Any, options: dict[str, Any], change: Change, *, backwards: int = 1, late: bool = False
) -> float:
    """What one step took off a weight whose gradient is 8, changed after the block."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 32.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    door.initialize(model, optimizer, verbosity=0, **options)

    def step(change: Change) -> None:
        optimizer.zero_grad()
        for _ in range(backwards):
            with door.scale_loss(model.weight.float().sum() * (8 / backwards), optimizer) as scaled:
                scaled.backward()
        change(model)
        optimizer.step()

    try:
        for _ in range(12 if late else 0):
            step(nothing)
        optimizer.param_groups[0]["lr"] = 1.0
        step(change)
        return 32.0 - next(iter(amp.master_params(optimizer))).flatten()[0].item()
    finally:
        preamp.engine_of(model).close()


DOORS = pytest.mark.parametrize("door", [amp, preamp], ids=["amp", "preamp"])
BACKWARDS = pytest.mark.parametrize("backwards", [1, 2])
LATE = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
HALF = {"O2": "float16", "O5": "bfloat16"}
OPTIONS = [
    {"opt_level": level, "loss_scale": scale} for level in LEVEL_NAMES for scale in (1.0, 64.0)
]


@DOORS
@pytest.mark.parametrize("change", [halve, clip_values, replace, clip_norm])
@BACKWARDS
@LATE
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_becomes_of_a_change(
    door: Any, change: Change, options: dict[str, Any], backwards: int, late: bool
) -> None:
    """It counts, is without effect, or would reach a part of the sum, or what is scaled."""
    half, wanted = HALF.get(options["opt_level"]), 8.0
    outcome: AbstractContextManager[Any]
    if half is None or (options["loss_scale"] == 1.0 and backwards == 1):
        outcome, wanted = nullcontext(), 4.0
    elif options["loss_scale"] == 1.0:
        if change is clip_values:
            return  # of two halves of the sum none is above 4
        outcome = refused("compat", "a change of a part", changes=True, half=half)
    elif door is amp and not late:
        outcome = pytest.warns(UserWarning, match="as with Apex that has no effect")
    else:
        outcome = refused("compat", "a change of a scaled gradient", changes=True, half=half)
    with outcome:
        taken = take_step(door, options, change, backwards=backwards, late=late)
        assert taken == pytest.approx(wanted, rel=1e-2 if change is clip_norm else 0.0)


@DOORS
@BACKWARDS
@LATE
@pytest.mark.parametrize(
    "options", [{"opt_level": "O5"}, {"opt_level": "O2", "loss_scale": 64.0}], ids=["O5", "O2"]
)
def test_what_counts_with_masters(
    door: Any, options: dict[str, Any], backwards: int, late: bool
) -> None:
    """Zeros, None, and clipping what masters have; the norm of four gradients of 8 is 16."""

    def optimizer(model: nn.Module) -> Any:
        return preamp.engine_of(model).optimizers[0]

    changes: list[tuple[Change, float]] = [
        (lambda model: model.zero_grad(set_to_none=False), 0.0),
        (nn.Module.zero_grad, 0.0),
        (lambda model: preamp.clip_grad_norm_(optimizer(model), math.inf), 8.0),
        (lambda model: preamp.clip_grad_norm_(optimizer(model), 8.0), 4.0),
        (lambda m: nn.utils.clip_grad_norm_(amp.master_params(optimizer(m)), 8.0), 4.0),
    ]
    for change, taken in changes:
        found = take_step(door, options, change, backwards=backwards, late=late)
        assert found == pytest.approx(taken, rel=1e-6)
