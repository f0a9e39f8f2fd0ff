# SPDX-License-Identifier: BSD-3-Clause
"""Clipping takes the norm that the check for overflow took along, unless gradients are others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import preamp
from cases.levels import WITH_MASTERS
from preamp.optimizers import FusedAdam

SCALES = pytest.mark.parametrize(("level", "scale"), [("O2", "dynamic"), ("O5", "dynamic")])


class Run:
    """A model of two layers whose optimizers have clipped in the step before."""

    def __init__(self, level: str, scale: object = "dynamic", optimizers: int = 1) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
        made = [FusedAdam(self.model.parameters(), lr=0.0) for _ in range(optimizers)]
        self.model, made = preamp.initialize(
            self.model, made, opt_level=level, loss_scale=scale, verbosity=0
        )
        self.optimizers = made
        self.inputs = torch.randn(4, 8)
        self.block()
        for optimizer in made:
            preamp.clip_grad_norm_(optimizer, 1e9)
            optimizer.step()
        for optimizer in made:
            optimizer.zero_grad()

    def block(
        self, *optimizers: torch.optim.Optimizer, factor: float = 1.0, layers: slice = slice(2)
    ) -> None:
        outputs = self.inputs.to(self.model[0].weight.dtype)
        for layer in list(self.model)[layers]:
            outputs = layer(outputs)
        loss = outputs.float().square().mean() * factor
        with preamp.scale_loss(loss, list(optimizers or self.optimizers)) as scaled:
            scaled.backward()

    def norm(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        grads = [p.grad for p in preamp.master_params(optimizer) if p.grad is not None]
        return torch.stack([g.double().norm() for g in grads]).norm().float() if grads else zero()


def zero() -> torch.Tensor:
    return torch.zeros(())


def check_norm(run: Run, optimizer: torch.optim.Optimizer) -> None:
    told = preamp.clip_grad_norm_(optimizer, 1e9)
    torch.testing.assert_close(told.float(), run.norm(optimizer), rtol=1e-3, atol=1e-6)


@SCALES
@pytest.mark.parametrize("to_none", [True, False])
def test_another_optimizer_of_the_weights_drops_them(level: str, scale: str, to_none: bool) -> None:
    run = Run(level, scale, optimizers=2)
    first, second = run.optimizers
    run.block()
    first.zero_grad(set_to_none=to_none)
    check_norm(run, second)


@SCALES
def test_another_optimizer_of_the_weights_has_a_backward(level: str, scale: str) -> None:
    run = Run(level, scale, optimizers=2)
    first, second = run.optimizers
    run.block()
    first.zero_grad()
    run.block(first, factor=3.0)
    check_norm(run, second)


@SCALES
def test_a_penalty_on_a_master(level: str, scale: str) -> None:
    run = Run(level, scale)
    (optimizer,) = run.optimizers
    run.block(layers=slice(1))
    masters = list(preamp.master_params(optimizer))
    masters[1].double().square().sum().backward()
    check_norm(run, optimizer)


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_a_write_to_some_elements(level: str) -> None:
    """No loss scale is on them, so the script may; a dynamic one has the norm taken along."""
    run = Run(level)
    (optimizer,) = run.optimizers
    run.block()
    outputs = run.inputs.to(run.model[0].weight.dtype)
    optimizer.zero_grad()
    run.model(outputs).float().square().mean().backward()
    run.model[0].weight.grad[5:] = 0
    run.model[1].weight.grad.mul_(1)
    check_norm(run, optimizer)


REPLACE: list[Callable[[nn.Parameter], None]] = [
    lambda p: setattr(p, "grad", torch.full_like(p, 100.0)),
    lambda p: (setattr(p, "grad", None), setattr(p, "grad", torch.full_like(p, 100.0)))[0],
]


@pytest.mark.parametrize("level", ["O0", "O1"])
@pytest.mark.parametrize("replace", REPLACE)
def test_gradients_are_replaced(level: str, replace: Callable[[nn.Parameter], None]) -> None:
    run = Run(level)
    (optimizer,) = run.optimizers
    run.block()
    for param in run.model.parameters():
        replace(param)
    check_norm(run, optimizer)
