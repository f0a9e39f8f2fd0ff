# SPDX-License-Identifier: BSD-3-Clause
"""Trainings that go well until something is changed, or that begin with a setting that is wrong.

Each takes the file for its records, and the numbers that it may be asked to change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import preamp
from insight.report_scripts import inputs

LR = 0.05


class Normed(nn.Module):
    """Two layers with a norm in between, or another module in its place."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 24)
        self.norm = norm
        self.body = nn.Linear(24, 24)
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, 4), of shape (batch, 8)."""
        return self.head(torch.relu(self.body(torch.relu(self.norm(self.stem(x))))))


class Scene:
    """A model in training, and what a script may change of it between two steps."""

    def __init__(self, norm: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = Normed(norm or nn.LayerNorm(24))
        self.x, self.labels = inputs()
        self.lr = LR
        self.factor = 1.0  # on the loss
        self.keep: slice = slice(None)  # rows of the batch
        self.kept = self.x  # inputs to go back to

    def rewrite(self, size: float, *names: str) -> None:
        """Draw the weights anew, those named or all."""
        random = torch.Generator().manual_seed(5)
        for name, param in self.model.named_parameters():
            if not names or name in names:
                param.copy_(size * torch.randn(param.shape, generator=random))


class OwnBatchNorm(nn.Module):
    """A batch norm that somebody wrote; torch's own refuses a batch of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` of shape (batch, width), normed over the batch."""
        return (x - x.mean(0)) / torch.sqrt(x.var(0, unbiased=False) + 1e-5)


Change = Callable[[Scene], None]


def setting(**values: Any) -> Change:
    """Return what sets the attributes of a scene."""

    def change(scene: Scene) -> None:
        for name, value in values.items():
            setattr(scene, name, value)

    return change


def larger(factor: float) -> Change:
    """Return what multiplies the inputs; by zero, they are gone."""

    def change(scene: Scene) -> None:
        scene.x = scene.x * factor

    return change


def permuted(scene: Scene) -> None:
    """Give each class the label of another one."""
    scene.labels = (scene.labels + 1) % 4


def dead(scene: Scene) -> None:
    """Push what goes into the last relu far below zero."""
    scene.model.get_parameter("body.bias").sub_(1e3)


def rate_of_warm_up(step: int) -> float:
    """Grow by an eighth in each step, to 100 times what is good."""
    return 1e-4 * 1.12 ** min(step, 100)


def rate_after_resuming(step: int) -> float:
    """Fall to nothing, and begin again at far too much."""
    return 0.05 * (1 - step / 61) if step <= 60 else 20.0


def trained(
    path: Path,
    *,
    steps: int = 120,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    more: Mapping[str, Any] | None = None,
    changes: Mapping[int, Change] | None = None,
    rate: Callable[[int], float] | None = None,
    resumed_at: int = 0,
    **options: Any,
) -> None:
    """Train, with each of ``changes`` made before its step; may go on from a checkpoint."""
    scene = Scene(options.pop("norm", None))
    scene.lr = lr = options.pop("lr", LR)
    clip = options.pop("clip", None)
    optimizer = kind(scene.model.parameters(), lr=lr, **(more or {}))
    given = {"numerics": "light", "numerics_every": 5, "opt_level": options.pop("level", "O2")}
    preamp.initialize(scene.model, optimizer, verbosity=0, history=path, **(given | options))
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(2.0**12)
    try:
        for step in range(1, steps + 1):
            if change := (changes or {}).get(step):
                with torch.no_grad():
                    change(scene)
            if step == resumed_at + 1 and resumed_at:
                saved = path.with_suffix(".ckpt")
                preamp.save_checkpoint(saved, models=scene.model, optimizers=optimizer)
                preamp.load_checkpoint(saved, models=scene.model, optimizers=optimizer)
            optimizer.param_groups[0]["lr"] = rate(step) if rate else scene.lr
            made = scene.model(scene.x[scene.keep]).float()
            loss = scene.factor * F.cross_entropy(made, scene.labels[scene.keep])
            with preamp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            if clip is not None:
                preamp.clip_grad_norm_(optimizer, clip)
            optimizer.step()
            optimizer.zero_grad()
    except preamp.LossScaleError:  # the scale fell to nothing: the run is over
        pass
    finally:
        engine.close()
