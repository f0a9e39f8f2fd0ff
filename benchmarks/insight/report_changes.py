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


Change = Callable[[Scene], None]


def trained(
    path: Path,
    *,
    level: str = "O2",
    steps: int = 120,
    kind: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    lr: float = LR,
    more: Mapping[str, Any] | None = None,
    norm: nn.Module | None = None,
    changes: Mapping[int, Change] | None = None,
    rate: Callable[[int], float] | None = None,
    clip: float | None = None,
    resumed_at: int = 0,
    **options: Any,
) -> None:
    """Train, with each of ``changes`` made before its step; may go on from a checkpoint."""
    scene = Scene(norm)
    scene.lr = lr
    optimizer = kind(scene.model.parameters(), lr=lr, **(more or {}))
    given = {"numerics": "light", "numerics_every": 5, **options}
    preamp.initialize(scene.model, optimizer, True, level, verbosity=0, history=path, **given)
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
