# SPDX-License-Identifier: BSD-3-Clause
"""``clip_grad_norm_`` with every kind of norm, at every level, against float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from engine.harness import HALF

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
    half = HALF[level] if level == "O3" else torch.float32
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
