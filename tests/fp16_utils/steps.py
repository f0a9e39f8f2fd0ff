# SPDX-License-Identifier: BSD-3-Clause
"""A half model, the same training in plain float32 torch, and ways to make overflows."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from cases.models import Exact, loss_of, values
from preamp.fp16_utils import FP16_Optimizer, convert_network

HALVES = (torch.float16, torch.bfloat16)

Build = Callable[..., torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Steps that are easy to follow: a gradient of 1 takes 1 off."""
    return torch.optim.SGD(params, lr=1.0)


def pair(
    dtype: torch.dtype, build: Build, **arguments: Any
) -> tuple[nn.Module, FP16_Optimizer, nn.Module, torch.optim.Optimizer]:
    """A model with half and float32 parameters, its optimizer, and both again in float32.

    All gradients of `Exact` are exact, so that the two trainings agree bitwise.
    """
    model = convert_network(Exact(), dtype)
    plain = copy.deepcopy(model).float()
    optimizer = FP16_Optimizer(build(model.parameters()), verbose=False, **arguments)
    return model, optimizer, plain, build(plain.parameters())


def plain_step(plain: nn.Module, optimizer: torch.optim.Optimizer, *batches: int) -> None:
    """Sum the gradients of the batches and step."""
    optimizer.zero_grad()
    for index in batches:
        loss_of([plain], index).backward()
    optimizer.step()


def assert_agree(model: nn.Module, optimizer: FP16_Optimizer, plain: nn.Module) -> None:
    """Masters are the plain run's weights, bitwise; the model holds them rounded."""
    wanted = values(plain)
    assert all(map(torch.equal, values(optimizer), wanted))
    rounded = [p.to(q.dtype) for p, q in zip(wanted, model.parameters(), strict=True)]
    assert all(map(torch.equal, values(model), rounded))


def net(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Three layers, of which the second is frozen."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)).to(dtype)
    model[1].weight.requires_grad_(False)
    model.append(nn.Linear(2, 1, bias=False).to(dtype))
    return model


class Weights(nn.Module):
    """A half parameter and a float32 one, all ones; the gradient of `loss` is ``factor``."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.ones(2, dtype=dtype))
        self.wide = nn.Parameter(torch.ones(2))

    def loss(self, factor: float = 1.0) -> torch.Tensor:
        return (self.low.float().sum() + self.wide.sum()) * factor


def wrapped(build: Build = sgd, **arguments: Any) -> tuple[Weights, FP16_Optimizer]:
    """`Weights` in an optimizer."""
    model = Weights()
    return model, FP16_Optimizer(build(model.parameters()), verbose=False, **arguments)


def gradients(optimizer: FP16_Optimizer) -> list[list[float]]:
    """What the optimizer would use."""
    found = optimizer.inspect_master_grad_data()
    assert found is not None
    return [[] if grad is None else grad.tolist() for group in found for grad in group]


def picture(optimizer: FP16_Optimizer, model: nn.Module) -> Mapping[str, Any]:
    """Everything that a refused call must leave as it was."""
    state = optimizer.state_dict()
    return {
        "weights": values(model),
        "masters": values(optimizer),
        "scaler": state["loss_scaler"],
        "flags": (state["overflow"], state["first_closure_call_this_step"]),
        "inner": copy.deepcopy(state["optimizer_state_dict"]),
    }
