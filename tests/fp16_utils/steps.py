# SPDX-License-Identifier: BSD-3-Clause
"""Both FP16_Optimizers on models whose gradients are exact, and the same in plain float32 torch."""

import copy
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

import preamp.optimizers
from cases.models import Exact, Parts, loss_of, values
from preamp.fp16_utils import FP16_Optimizer, convert_network

HALVES = (torch.float16, torch.bfloat16)
KINDS: dict[str, Any] = {"general": FP16_Optimizer, "flat": preamp.optimizers.FP16_Optimizer}

Build = Callable[..., torch.optim.Optimizer]


def sgd(params: Any) -> torch.optim.Optimizer:
    """Steps that are easy to follow: a gradient of 1 takes 1 off."""
    return torch.optim.SGD(params, lr=1.0)


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": list(part.parameters())} for part in model.children()]


class EarlyAdam(torch.optim.Optimizer):
    """The formula of the FusedAdam of early 2019, without bias correction, in plain torch.

    ``g = grad / c``, moments, ``p -= lr * (m / (sqrt(v) + eps) + decay * p)``, where ``c`` is 1, or
    larger where the norm of a group exceeds ``max_grad_norm``.
    """

    def __init__(self, params: Any, lr: float = 0.125, **options: float) -> None:
        defaults = {"lr": lr, "betas": (0.5, 0.75), "eps": 2.0**-10, "weight_decay": 0.0}
        super().__init__(params, {**defaults, "max_grad_norm": 0.0, **options})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            factor, (beta1, beta2) = 1.0, group["betas"]
            if params and group["max_grad_norm"] > 0:
                norm = float(torch.stack([param.grad.norm() for param in params]).norm())
                factor = max((norm + 1e-6) / group["max_grad_norm"], 1.0)
            for param in params:
                zeros = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                state = self.state[param] = self.state.get(param) or {"step": 0, **zeros}
                state["step"] += 1
                g, m, v = param.grad / factor, state["exp_avg"], state["exp_avg_sq"]
                m.mul_(beta1).add_(g, alpha=1 - beta1)
                v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
                change = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * param
                param.sub_(change, alpha=group["lr"])


class Pair:
    """The same training by an FP16_Optimizer, and by torch in float32 without one."""

    def __init__(self, kind: str, build: Build, dtype: Any = torch.float16, **options: Any) -> None:
        self.model = convert_network(Exact(), dtype) if kind == "general" else Parts().to(dtype)
        self.plain = copy.deepcopy(self.model).float()
        self.optimizer = KINDS[kind](build(groups_of(self.model)), verbose=False, **options)
        self.reference = build(groups_of(self.plain))

    def backward(self, index: int, **how: Any) -> None:
        self.optimizer.backward(loss_of([self.model], index), **how)
        loss_of([self.plain], index).backward()

    def step(self) -> None:
        """And check: masters are the plain run's weights, bitwise; the model has them rounded."""
        assert self.optimizer.step() is None
        self.reference.step()
        self.check()

    def check(self) -> None:
        wanted = values(self.plain)
        assert torch.equal(flat(values(self.optimizer)), flat(wanted))
        rounded = [p.to(q.dtype) for p, q in zip(wanted, self.model.parameters(), strict=True)]
        assert all(map(torch.equal, values(self.model), rounded))
        if "fp16_groups_flat" in vars(self.optimizer):
            assert_bound(self.model, self.optimizer)

    def zero(self, *, to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_grads_to_None=to_none)
        self.reference.zero_grad()

    def train(self, *indices: int) -> None:
        for index in indices:
            self.zero(to_none=index % 2 == 0)
            self.backward(index)
            self.step()


def flat(tensors: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in tensors])


def assert_bound(model: nn.Module, optimizer: Any) -> None:
    """Parameters are views of the buffers, and the buffers are the rounded masters."""
    buffers = optimizer.fp16_groups_flat
    for buffer, master in zip(buffers, optimizer.fp32_groups_flat, strict=True):
        assert torch.equal(buffer, master.detach().to(buffer.dtype))
    ranges = [(buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes) for buffer in buffers]
    for param in model.parameters():
        assert any(start <= param.data_ptr() < stop for start, stop in ranges)
    assert torch.equal(flat(values(model)), torch.cat(buffers))


class Weights(nn.Module):
    """A half parameter and a float32 one, all ones; the gradient of `loss` is ``factor``."""

    def __init__(self, dtype: torch.dtype = torch.float16) -> None:
        super().__init__()
        self.low = nn.Parameter(torch.ones(2, dtype=dtype))
        self.wide = nn.Parameter(torch.ones(2))

    def loss(self, factor: float = 1.0) -> torch.Tensor:
        return (self.low.float().sum() + self.wide.sum()) * factor


def wrapped(kind: str = "general", **options: Any) -> tuple[Weights, Any]:
    """`Weights` in an optimizer; in a group each for the flat one."""
    model = Weights()
    groups = [{"params": [param]} for param in model.parameters()]
    inner = sgd(model.parameters() if kind == "general" else groups)
    return model, KINDS[kind](inner, **{"verbose": False, **options})


def parts(build: Build = sgd, **options: Any) -> tuple[Parts, Any]:
    """`Parts` in half in the flat optimizer."""
    model = Parts().half()
    return model, KINDS["flat"](build(groups_of(model)), **{"verbose": False, **options})


def gradients(optimizer: FP16_Optimizer) -> list[list[float]]:
    """What the optimizer would use."""
    found = optimizer.inspect_master_grad_data()
    assert found is not None
    return [[] if grad is None else grad.tolist() for group in found for grad in group]


def masters_of(optimizer: Any) -> list[torch.Tensor]:
    """Those of half parameters as the state has them."""
    state = optimizer.state_dict()
    groups = [state["fp32_groups_flat"]] if "fp32_groups_flat" in state else state["fp32_from_fp16"]
    return [master for group in groups for master in group]


def through_a_file(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def picture(optimizer: Any, model: nn.Module) -> Mapping[str, Any]:
    """Everything that a refused call must leave as it was."""
    state = optimizer.state_dict()
    return copy.deepcopy({"weights": values(model), "masters": values(optimizer), "state": state})


def net(dtype: torch.dtype = torch.float16) -> nn.Sequential:
    """Three layers, of which the second is frozen."""
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2, bias=False)).to(dtype)
    model[1].weight.requires_grad_(False)
    model.append(nn.Linear(2, 1, bias=False).to(dtype))
    return model
