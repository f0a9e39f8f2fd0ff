# SPDX-License-Identifier: BSD-3-Clause
"""Runs of the kit with all that a checkpoint has to bring back: random numbers, schedulers."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn, optim

import preamp
from cases import fused
from kit.run import Run, act, build
from preamp.core.tensors import stored_grad

Build = Callable[[Any], optim.Optimizer]

TORCH: dict[str, Build] = {
    name: functools.partial(build, name)
    for name in ("SGD", "Adam", "AdamW fused", "RMSprop", "Adagrad", "RAdam")
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


class SavedRun(Run):
    """A model, an optimizer and a scheduler for each of ``names``, on random batches."""

    def __init__(self, level: str, *names: str, seed: int = 0, **options: Any) -> None:
        names = names or ("Adam",)
        super().__init__(level, model=Net, count=len(names), seed=seed, starts=False, **options)
        params = [model.parameters() for model in self.models]
        self.optimizers = [BUILDS[name](own) for name, own in zip(names, params, strict=True)]
        self.optimizer = self.optimizers[0]
        self.schedulers: Any = [optim.lr_scheduler.MultiStepLR(o, [2, 3]) for o in self.optimizers]
        self.seed = seed
        self.initialize()

    def save(self, path: Any, **options: Any) -> Any:
        extra = {"seed": self.seed}
        return preamp.save_checkpoint(
            path, self.models, self.optimizers, self.schedulers, extra, **options
        )

    def load(self, path: Any, **options: Any) -> Any:
        return preamp.load_checkpoint(
            path, self.models, self.optimizers, self.schedulers, **options
        )

    def numbers(self) -> dict[str, Any]:
        """Also schedulers, random states, flags of overflow, and gradients wherever they lie."""
        optimizers = self.optimizers
        owners = [[*m.parameters()] for m in self.models] + [
            [p for group in o.param_groups for p in group["params"]] for o in optimizers
        ]
        stored = [[stored_grad(param) for param in params] for params in owners]
        # Split ones have no values of their own; the models' states have them.
        masters = [] if self.options.get("storage") == "split" else owners
        return super().numbers() | {
            "gradients": [[None if g is None else g.clone() for g in each] for each in stored],
            "masters": [[p.detach().clone() for p in params] for params in masters],
            "schedulers": [copy.deepcopy(s.state_dict()) for s in self.schedulers],
            "flags": [float(scaler.found_inf) for scaler in self.engine.scalers],
            "random": (torch.get_rng_state(), random.getstate()),
        }

    def causes(self) -> list[Any]:
        """What is told of skipped steps, as far as it does not depend on earlier backwards."""
        return [
            (c.step, c.loss_id, sorted(c.parameters), c.old_scale, c.new_scale, c.loss_was_finite)
            for c in self.engine.overflow_causes
        ]


@act
def random_backward(
    run: SavedRun, loss_id: int = 0, *how: Literal["inf", "delay", "late", "first", "second"]
) -> None:
    """A block of the loss ``loss_id``, of the ``first`` or the ``second`` model or of all."""
    x = torch.randn(4, 2, 4, 4) + random.random()
    members = [m for m, name in enumerate(("first", "second")) if name in how]
    members = members or [*range(len(run.models))]
    losses = [run.models[m](x).float().square().mean() for m in members]
    with preamp.scale_loss(
        sum(losses),  # type: ignore[arg-type]
        [run.optimizers[m] for m in members],
        loss_id=loss_id,
        delay_unscale="delay" in how,
        delay_overflow_check="late" in how,
    ) as scaled:
        (scaled * float("inf") if "inf" in how else scaled).backward()


@act
def clip_first(run: SavedRun) -> None:
    preamp.clip_grad_norm_(run.optimizer, 0.25)


@act
def scheduled_step(run: SavedRun, which: int = 0) -> None:
    """Of an optimizer and its scheduler."""
    run.optimizers[which].step()
    run.schedulers[which].step()


STEP = "random_backward; scheduled_step; zero; "
