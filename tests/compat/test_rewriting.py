# SPDX-License-Identifier: BSD-3-Clause
"""Half gradients written to after scale_loss: without effect under Apex's names, with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.tolerances import assert_same
from preamp import amp
from preamp.core.errors import PreampStateError

X = torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.0, -1.0]])
NO_EFFECT = "^The float16 gradient of '0.weight' was changed after scale_loss"


def made() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 3


def train(
    model: nn.Module,
    optimizer: Any,
    change: Callable[[nn.Module], None] | None,
    steps: int = 3,
    micro: int = 1,
) -> list[torch.Tensor]:
    for step in range(steps):
        for part in range(micro):
            loss = model(X * (1 + step + part)).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            if change is not None:
                change(model)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in amp.master_params(optimizer)]


@pytest.mark.apex("2.1 changing those half gradients in place")
@pytest.mark.parametrize("change", [clip, clip_values, replace])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_script_that_writes_to_half_gradients_runs_on(
    change: Callable[[nn.Module], None], micro: int
) -> None:
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    wanted = train(model, optimizer, None, micro=micro)
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.warns(UserWarning, match=NO_EFFECT) as caught:
        found = train(model, optimizer, change, micro=micro)
    assert len(caught) == 1
    for ours, exact in zip(found, wanted, strict=True):
        assert_same(ours, exact)


def test_it_goes_on_after_the_steps_that_are_watched() -> None:
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.warns(UserWarning, match=NO_EFFECT):
        train(model, optimizer, clip, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, optimizer, clip, 20)
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, None, 1)
    for ours, exact in zip(found, train(model, optimizer, None, 20), strict=True):
        assert_same(ours, exact)


@pytest.mark.apex("2.1 changing them for the first time later")
def test_who_begins_late_is_refused() -> None:
    """By then masters take half gradients as they lie, and what was written over is lost."""
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, None, 12)
    with pytest.raises(PreampStateError, match="was changed in place or replaced"):
        train(model, optimizer, clip, 1)


def test_zeroing_and_dropping_still_count() -> None:
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    found = train(model, optimizer, lambda model: model.zero_grad(), 2)
    for ours, exact in zip(found, before, strict=True):
        assert_same(ours, exact)


def test_preamps_own_engines_refuse() -> None:
    model, optimizer = made()
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.raises(PreampStateError, match="was changed in place or replaced"):
        train(model, optimizer, clip, 1)


def test_several_optimizers_warn_once() -> None:
    model, _ = made()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.25) for part in model]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    with amp.scale_loss(model(X).square().mean(), optimizers) as scaled:
        scaled.backward()
    clip(model)
    with pytest.warns(UserWarning, match=NO_EFFECT):
        optimizers[0].step()
    optimizers[1].step()  # warnings are errors here
