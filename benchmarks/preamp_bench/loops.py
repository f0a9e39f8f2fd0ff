# SPDX-License-Identifier: BSD-3-Clause
"""Training loops: with preamp at an opt level, and the same written by hand with torch."""

# torch leaves backward() and step() untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import preamp
from preamp.optimizers import FusedAdam
from preamp_bench.tasks import Task

MAX_NORM = 1.0
SETTINGS: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1, "eps": 1e-5}
"""AdamW's, with the eps that pure float16 needs."""

_FLOAT32 = ("cross_entropy", "gelu", "layer_norm", "softmax")
"""What torch.autocast computes in float32 on GPUs, and in half precision on CPUs."""

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Loop(Protocol):
    """One training, step by step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def backward(self) -> None:
        """Compute gradients, ready for `update`."""
        ...

    def update(self) -> None:
        """Take the step and drop the gradients."""
        ...


def torch_adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make torch's AdamW."""
    return torch.optim.AdamW(parameters, **SETTINGS, fused=True)


def fused_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make preamp's AdamW."""
    return FusedAdam(parameters, **SETTINGS, adam_w_mode=True)


class WithPreamp:
    """The three lines of preamp in an ordinary loop."""

    def __init__(self, task: Task, level: str, make: MakeOptimizer) -> None:
        """Initialize the model and its optimizer."""
        self._task = task
        self.model, self.optimizer = preamp.initialize(
            task.model, make(task.model.parameters()), opt_level=level, verbosity=0
        )

    def backward(self) -> None:
        """Compute clipped gradients."""
        loss = self._task.loss(self.model(self._task.inputs))
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        preamp.clip_grad_norm_(self.optimizer, MAX_NORM)

    def update(self) -> None:
        """Take the step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Autocast:
    """float32 weights; `torch.autocast` and `torch.amp.GradScaler` as far as they are wanted.

    Where it ``widens``, a CPU computes in float32 what a GPU does, as preamp does everywhere.
    """

    def __init__(
        self, task: Task, half: torch.dtype | None, scales: bool, widens: bool = True
    ) -> None:
        """Make optimizer and scaler."""
        self._task = task
        self._half = half
        self._widened = _FLOAT32 if widens and half and task.device.type == "cpu" else ()
        self.model = task.model
        self.optimizer = torch_adamw(task.model.parameters())
        self._scaler = torch.amp.GradScaler(task.device.type, enabled=scales)

    def backward(self) -> None:
        """Compute clipped gradients."""
        with self._region():
            outputs = self.model(self._task.inputs)
            loss = self._task.loss(outputs)
        self._scaler.scale(loss).backward()
        self._scaler.unscale_(self.optimizer)
        clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def update(self) -> None:
        """Take the step."""
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.optimizer.zero_grad()

    @contextmanager
    def _region(self) -> Generator[None]:
        half = self._half or torch.bfloat16
        kept = {name: getattr(F, name) for name in self._widened}
        for name, function in kept.items():
            setattr(F, name, _widened(function))
        try:
            with torch.autocast(self._task.device.type, half, enabled=self._half is not None):
                yield
        finally:
            for name, function in kept.items():
                setattr(F, name, function)


def _widened(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` of the float32 values of its first argument; weights are float32 anyway."""

    @wraps(function)
    def call(first: torch.Tensor, *rest: Any, **options: Any) -> Any:
        return function(first.float(), *rest, **options)

    return call


class PureHalf:
    """Everything in half precision; no masters, no loss scale."""

    def __init__(self, task: Task, half: torch.dtype) -> None:
        """Cast the model and make the optimizer."""
        self._task = task
        self._half = half
        self.model = task.model.to(half)
        self.optimizer = torch_adamw(self.model.parameters())

    def backward(self) -> None:
        """Compute clipped gradients."""
        self._task.loss(self.model(_cast(self._task.inputs, self._half)).float()).backward()
        clip_grad_norm_(self.model.parameters(), MAX_NORM)

    def update(self) -> None:
        """Take the step."""
        self.optimizer.step()
        self.optimizer.zero_grad()


class Masters:
    """Half weights, float32 batch normalization and masters; gradients of these keep their memory.

    A first loss scale of 1 is never changed.
    """

    def __init__(self, task: Task, half: torch.dtype, scale: float) -> None:
        """Copy the masters before the cast."""
        self._task = task
        self._half = half
        self._scale = self._first_scale = scale
        self._steps_at_scale = 0
        values = [parameter.detach().clone() for parameter in task.model.parameters()]
        self.model = task.model.to(half)
        for module in self.model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.float()
        parameters = list(self.model.parameters())
        self._pairs = [
            (nn.Parameter(value), parameter)
            for value, parameter in zip(values, parameters, strict=True)
            if parameter.dtype is half
        ]
        for master, _ in self._pairs:
            master.grad = torch.empty_like(master)
        self._direct = [parameter for parameter in parameters if parameter.dtype is not half]
        self._updated = [*(master for master, _ in self._pairs), *self._direct]
        self.optimizer = torch_adamw(self._updated)
        self._is_finite = True

    def backward(self) -> None:
        """Compute clipped gradients of the masters."""
        loss = self._task.loss(self.model(_cast(self._task.inputs, self._half)).float())
        (loss * self._scale).backward()
        with torch.no_grad():
            for master, half in self._pairs:
                if master.grad is not None and half.grad is not None:
                    master.grad.copy_(half.grad)
            if self._scale != 1.0:
                for parameter in self._updated:
                    if parameter.grad is not None:
                        parameter.grad.mul_(1 / self._scale)
        norm = clip_grad_norm_(self._updated, MAX_NORM)
        self._is_finite = self._first_scale == 1.0 or bool(norm.isfinite())

    def update(self) -> None:
        """Take the step, or halve the loss scale."""
        if self._is_finite:
            self.optimizer.step()
            with torch.no_grad():
                for master, half in self._pairs:
                    half.copy_(master)
        if self._first_scale != 1.0:
            self._adjust_scale()
        for parameter in (*(half for _, half in self._pairs), *self._direct):
            parameter.grad = None

    def _adjust_scale(self) -> None:
        self._steps_at_scale = self._steps_at_scale + 1 if self._is_finite else 0
        if not self._is_finite:
            self._scale /= 2
        elif self._steps_at_scale == 2000:
            self._scale *= 2
            self._steps_at_scale = 0


def _cast(inputs: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """The inputs of one step; data sets hold images in float32."""
    return inputs.to(half) if inputs.is_floating_point() else inputs


BY_HAND: Mapping[str, Callable[[Task], Loop]] = MappingProxyType(
    {
        "O0": partial(Autocast, half=None, scales=False),
        "O1": partial(Autocast, half=torch.float16, scales=True),
        "O2": partial(Masters, half=torch.float16, scale=2.0**16),
        "O3": partial(PureHalf, half=torch.float16),
        "O4": partial(Autocast, half=torch.bfloat16, scales=False),
        "O5": partial(Masters, half=torch.bfloat16, scale=1.0),
    }
)
"""For each opt level a loop of the same numerics."""


def make_loop(task: Task, way: str, level: str) -> Loop:
    """Make the loop that a worker runs.

    ``way`` is ``"by hand"``; ``"autocast"``, torch's for bfloat16 as it is on the device, whatever
    the level; or, with preamp, ``"torch AdamW"`` or ``"FusedAdam"``.
    """
    if way == "by hand":
        return BY_HAND[level](task)
    if way == "autocast":
        return Autocast(task, torch.bfloat16, scales=False, widens=False)
    return WithPreamp(task, level, {"torch AdamW": torch_adamw, "FusedAdam": fused_adam}[way])
