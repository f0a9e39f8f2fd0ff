# SPDX-License-Identifier: BSD-3-Clause
"""Training runs as lists of events, to be stopped after any step."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn, optim

import preamp
from cases import fused
from preamp.core.tensors import stored_grad

Build = Callable[[Any], optim.Optimizer]

TORCH: dict[str, Build] = {
    "sgd": lambda params: optim.SGD(params, lr=0.125, momentum=0.5),
    "adam": lambda params: optim.Adam(params, lr=0.0625, eps=1e-4),
    "adamw-fused": lambda params: optim.AdamW(params, lr=0.0625, eps=1e-4, fused=True),
    "rmsprop": lambda params: optim.RMSprop(params, lr=0.01, momentum=0.5, centered=True),
    "adagrad": lambda params: optim.Adagrad(params, lr=0.1),
    "radam": lambda params: optim.RAdam(params, lr=0.05),
}
FUSED: dict[str, Build] = {
    case.name: functools.partial(case.kind, **{**case.variants[2], "lr": 0.0625})
    for case in fused.FUSED
    if case is not fused.EARLY_ADAM
}
"""Every fused optimizer; the third variant of each has momentum where there is a choice."""
BUILDS = {**TORCH, **FUSED}


class Net(nn.Module):
    """Layers that levels treat differently, random numbers, and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3)
        self.bn = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.25)
        self.last = nn.Linear(12, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.relu(self.bn(self.conv(x)))).flatten(1))


@dataclass(frozen=True)
class Backward:
    """One ``scale_loss`` block."""

    loss_id: int = 0
    delay_unscale: bool = False
    delay_overflow_check: bool = False
    poison: bool = False
    members: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Clip:
    """``preamp.clip_grad_norm_`` of one optimizer."""

    optimizer: int = 0


@dataclass(frozen=True)
class Step:
    """``optimizer.step()`` and the scheduler's."""

    optimizer: int = 0


@dataclass(frozen=True)
class Zero:
    """``optimizer.zero_grad``."""

    set_to_none: bool = True
    optimizer: int = 0


Event = Backward | Clip | Step | Zero


@dataclass
class Run:
    """Models, optimizers and schedulers that went through one ``preamp.initialize``."""

    level: str
    names: tuple[str, ...] = ("adam",)
    seed: int = 0
    arguments: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(self.seed)
        self.models: Any = [Net() for _ in self.names]
        self.optimizers: Any = [
            BUILDS[name](model.parameters())
            for name, model in zip(self.names, self.models, strict=True)
        ]
        self.schedulers: Any = [
            optim.lr_scheduler.MultiStepLR(optimizer, [2, 3]) for optimizer in self.optimizers
        ]
        preamp.initialize(
            self.models, self.optimizers, opt_level=self.level, verbosity=0, **self.arguments
        )

    def play(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, Backward):
                self._backward(event)
            elif isinstance(event, Clip):
                preamp.clip_grad_norm_(self.optimizers[event.optimizer], 0.25)
            elif isinstance(event, Step):
                self.optimizers[event.optimizer].step()
                self.schedulers[event.optimizer].step()
            else:
                self.optimizers[event.optimizer].zero_grad(set_to_none=event.set_to_none)

    def _backward(self, event: Backward) -> None:
        x = torch.randn(4, 2, 4, 4) + random.random()
        losses = [self.models[i](x).float().square().mean() for i in event.members]
        with preamp.scale_loss(
            sum(losses),  # type: ignore[arg-type]
            [self.optimizers[i] for i in event.members],
            loss_id=event.loss_id,
            delay_unscale=event.delay_unscale,
            delay_overflow_check=event.delay_overflow_check,
        ) as scaled:
            (scaled * float("inf") if event.poison else scaled).backward()

    def save(self, path: Any, **options: Any) -> Any:
        return preamp.save_checkpoint(
            path, self.models, self.optimizers, self.schedulers, {"seed": self.seed}, **options
        )

    def load(self, path: Any, **options: Any) -> Any:
        return preamp.load_checkpoint(
            path, self.models, self.optimizers, self.schedulers, **options
        )

    def numbers(self) -> dict[str, Any]:
        """Copies of all that training goes on from."""
        engine = preamp.engine_of(self.models[0])
        return {
            "weights": [[t.detach().clone() for t in weights_of(m)] for m in self.models],
            "masters": [[p.detach().clone() for p in params_of(o)] for o in self.optimizers],
            "optimizers": [copy.deepcopy(o.state_dict()) for o in self.optimizers],
            "gradients": [
                [_copied(stored_grad(p)) for p in (*m.parameters(), *params_of(o))]
                for m, o in zip(self.models, self.optimizers, strict=True)
            ],
            "schedulers": [copy.deepcopy(s.state_dict()) for s in self.schedulers],
            "engine": engine.state_dict(),
            "flags": [float(scaler.found_inf) for scaler in engine.scalers],
            "last_skipped": engine.last_step_skipped,
            "random": (torch.get_rng_state(), random.getstate()),
        }

    def causes(self) -> list[Any]:
        """What is told of skipped steps, as far as it does not depend on earlier backwards."""
        return [
            (c.step, c.loss_id, sorted(c.parameters), c.old_scale, c.new_scale, c.loss_was_finite)
            for c in preamp.engine_of(self.models[0]).overflow_causes
        ]


def weights_of(model: nn.Module) -> Sequence[torch.Tensor]:
    return [*model.parameters(), *model.buffers()]


def params_of(optimizer: optim.Optimizer) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _copied(grad: torch.Tensor | None) -> torch.Tensor | None:
    return None if grad is None else grad.clone()
