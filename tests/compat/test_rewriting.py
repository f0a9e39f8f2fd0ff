# SPDX-License-Identifier: BSD-3-Clause
"""Half gradients written to after scale_loss: each sentence of the page on clipping."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from kit.refusals import refused
from preamp import amp

Change = Callable[[nn.Module], object]


def grads(model: nn.Module) -> list[torch.Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def halve(model: nn.Module) -> None:
    for grad in grads(model):
        grad.mul_(0.5)


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.5


def clip_norm(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 8.0)


def nothing(model: nn.Module) -> None:
    """What a script without such lines does."""


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
@pytest.mark.parametrize("change", [halve, replace, clip_norm])
@BACKWARDS
@LATE
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_becomes_of_a_change(
    door: Any, change: Change, options: dict[str, Any], backwards: int, late: bool
) -> None:
    """It counts, or would reach a part of the sum, or what is scaled."""
    half, wanted = HALF.get(options["opt_level"]), 8.0
    outcome: AbstractContextManager[Any]
    if half is None or (options["loss_scale"] == 1.0 and backwards == 1):
        outcome, wanted = nullcontext(), 4.0
    elif options["loss_scale"] == 1.0:
        outcome = refused("compat", "a change of a part", changes=True, half=half)
    else:
        outcome = refused("compat", "a change of a scaled gradient", changes=True, half=half)
    with outcome:
        taken = take_step(door, options, change, backwards=backwards, late=late)
        assert taken == pytest.approx(wanted, rel=1e-2 if change is clip_norm else 0.0)
