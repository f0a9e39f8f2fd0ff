# SPDX-License-Identifier: BSD-3-Clause
"""Loops as scripts write them, for tests of what stands between their lines; else see `kit.run`."""

import copy
from typing import Any

import torch
from torch import nn

import preamp
from kit.run import PLAIN, Run, batch_of

OPTIMIZERS = ("SGD", "Adam", "AdamW")


def make(seed: int = 0, optimizer: str = "SGD") -> tuple[nn.Module, torch.optim.Optimizer]:
    """A fresh model and its optimizer, the same for the same seed."""
    run = Run(PLAIN, optimizer, seed=seed)
    return run.model, run.optimizer


def started(level: str, seed: int = 0, optimizer: str = "SGD", **arguments: Any) -> Any:
    """`make`, then initialize quietly."""
    run = Run(level, optimizer, seed=seed, **arguments)
    return run.model, run.optimizer


def loss_of(model: nn.Module, index: int) -> torch.Tensor:
    """Mean square of what one batch gives."""
    return model(batch_of(model, index)).float().square().mean()


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, index: int, *, poison: bool = False
) -> None:
    """One ordinary step; ``poison`` makes its gradients infinite."""
    optimizer.zero_grad()
    with preamp.scale_loss(loss_of(model, index), optimizer) as scaled:
        (scaled * float("inf") if poison else scaled).backward()
    optimizer.step()


def train_plain(model: nn.Module, optimizer: torch.optim.Optimizer, index: int) -> None:
    """One step without any engine."""
    optimizer.zero_grad()
    loss_of(model, index).backward()
    optimizer.step()


def masters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Copies of what the optimizer updates."""
    return [param.detach().clone() for param in preamp.master_params(optimizer)]


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Copies of all numbers that training changes."""
    return {
        "weights": weights(model),
        "exact": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "engine": preamp.engine_of(optimizer).state_dict(),
    }


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers as they are stored."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {name: tensor.detach().clone() for name, tensor in tensors}


def begin(level: str, model: Any, optimizer: Any, **options: Any) -> Any:
    """Initialize quietly; return the optimizer."""
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, **options)
    return optimizer


def scaled_backward(loss: torch.Tensor, owners: Any, loss_id: int = 0, **scaling: Any) -> None:
    """A block of its own for the backward of one loss."""
    with preamp.scale_loss(loss, owners, loss_id, **scaling) as scaled:
        scaled.backward()


def scaled_step(loss: torch.Tensor, optimizer: Any) -> None:
    """A whole iteration of one loss."""
    scaled_backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
