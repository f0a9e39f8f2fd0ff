# SPDX-License-Identifier: BSD-3-Clause
"""Tiny models, fixed batches and bitwise comparison, shared by the tests of whole engines."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import preamp
from cases.levels import LEVELS
from kit.run import Net

HALF = {row.name: row.half for row in LEVELS}

OptimizerMaker = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, OptimizerMaker] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.125, momentum=0.5),
    "adam": lambda params: torch.optim.Adam(params, lr=0.0625, eps=1e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.0625, eps=1e-4, weight_decay=0.1),
}


def make(
    seed: int = 0, optimizer: str = "sgd", model: Callable[[], nn.Module] = Net
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A fresh model and its optimizer, the same for the same seed."""
    torch.manual_seed(seed)
    net = model()
    return net, OPTIMIZERS[optimizer](net.parameters())


def started(level: str, seed: int = 0, optimizer: str = "sgd", **arguments: Any) -> Any:
    """`make`, then initialize quietly."""
    net, opt = make(seed, optimizer)
    return preamp.initialize(net, opt, opt_level=level, verbosity=0, **arguments)


def batch(step: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets of one step."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return (torch.randn(6, 4, generator=generator), torch.randn(6, 3, generator=generator))


def loss_of(model: nn.Module, step: int, seed: int = 0) -> torch.Tensor:
    """Mean squared error of one step's batch."""
    x, y = batch(step, seed)
    return (model(x).float() - y).square().mean()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: int, *, poison: bool = False
) -> None:
    """One ordinary step; ``poison`` makes its gradients infinite."""
    optimizer.zero_grad()
    loss = loss_of(model, step)
    with preamp.scale_loss(loss, optimizer) as scaled:
        (scaled * float("inf") if poison else scaled).backward()
    optimizer.step()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """One step without any engine."""
    optimizer.zero_grad()
    loss_of(model, step).backward()
    optimizer.step()


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers as they are stored."""
    return {
        name: tensor.detach().clone()
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of what the optimizer updates."""
    return [param.detach().clone() for param in preamp.master_params(optimizer)]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all numbers that training changes."""
    engine = preamp.engine_of(optimizer)
    return {
        "weights": weights(model),
        "masters": masters(optimizer),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "engine": engine.state_dict(),
    }
