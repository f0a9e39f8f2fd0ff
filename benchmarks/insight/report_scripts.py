# SPDX-License-Identifier: BSD-3-Clause
"""Trainings with a course of their own, of kinds that the report's rules were not written for.

Each takes the file for its records, and the numbers that it may be asked to change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import preamp

ROWS, CLASSES = 64, 4


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of eight numbers; the class is the largest of the first four."""
    x = torch.randn(ROWS, 8, generator=torch.Generator().manual_seed(1))
    return x, x[:, :CLASSES].argmax(1)


def net(out: int = CLASSES) -> nn.Module:
    """A small network, always the same."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 24), nn.Tanh()
    return nn.Sequential(*inner, nn.Linear(24, out))


@dataclass(frozen=True, slots=True)
class Training:
    """A model in training."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    def step(self, loss: torch.Tensor, lr: float | None = None) -> None:
        """Take a step, at another learning rate from here on if one is given."""
        if lr is not None:
            self.optimizer.param_groups[0]["lr"] = lr
        with preamp.scale_loss(loss, self.optimizer) as scaled:
            scaled.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def classify(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The loss of a classifier."""
        return F.cross_entropy(self.model(x).float(), labels)


@contextmanager
def training(
    path: Path, model: nn.Module, lr: float, level: str = "O2", **options: Any
) -> Iterator[Training]:
    """Train a model with Adam, and close its file at the end."""
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    given = {"numerics": "light", "numerics_every": 5, **options}
    preamp.initialize(model, optimizer, opt_level=level, verbosity=0, history=path, **given)
    engine = preamp.engine_of(optimizer)
    if engine.policy.is_dynamic:
        engine.scaler(0).set_scale(2.0**12)
    try:
        yield Training(model, optimizer)
    finally:
        engine.close()


def warm_restarts(path: Path, *, nan_at: int = 0) -> None:
    """Cosines from 1e-2 to nearly nothing, begun again every 40 steps."""
    x, labels = inputs()
    with training(path, net(), 1e-2, "O5") as run:
        for step in range(1, 161):
            rate = 1e-5 + 5e-3 * (1 + math.cos(math.pi * ((step - 1) % 40) / 40))
            bad = math.nan if step == nan_at else 1.0
            run.step(run.classify(x * bad, labels), rate)


def fine_tuning(path: Path) -> None:
    """Go on from a trained model: losses of 1e-3, most of them in a few batches."""
    x, labels = inputs()
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        F.cross_entropy(model(x), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    random = torch.Generator().manual_seed(0)
    with training(path, model, 1e-5) as run:
        for _ in range(200):
            rows = torch.randint(ROWS, (4,), generator=random)
            noise = 0.1 * torch.randn(4, 8, generator=random)
            run.step(run.classify(x[rows] + noise, labels[rows]))


def likelihood(path: Path, *, level: str = "O2", nan_at: int = 0) -> None:
    """Fit a normal distribution ever more closely: the loss goes far below zero."""
    x, _ = inputs()
    target = 0.01 * x[:, :4]
    with training(path, net(8), 1e-2, level) as run:
        for step in range(1, 301):
            bad = math.nan if step == nan_at else 1.0
            mean, log_std = run.model(x * bad).float().chunk(2, 1)
            run.step((log_std + ((target - mean) * torch.exp(-log_std)).square() / 2).mean())


def policy_gradient(path: Path) -> None:
    """Learn from rewards; the loss lies around zero and means nothing."""
    random = torch.Generator().manual_seed(0)
    with training(path, net(), 1e-3, "O5") as run:
        for _ in range(250):
            x = torch.randn(32, 8, generator=random)
            logs = F.log_softmax(run.model(x).float(), -1)
            chosen = torch.multinomial(logs.exp().detach(), 1, generator=random)
            rewards = (chosen[:, 0] == x[:, :CLASSES].argmax(1)).float()
            run.step(-(logs.gather(1, chosen)[:, 0] * (rewards - rewards.mean())).mean())


def curriculum(path: Path) -> None:
    """Learn four rows by heart, then all of them from step 101 on."""
    x, labels = inputs()
    with training(path, net(), 3e-3) as run:
        for step in range(1, 201):
            rows = slice(4 if step <= 100 else ROWS)
            run.step(run.classify(x[rows], labels[rows]))


def adversarial(path: Path) -> None:
    """Two losses and optimizers: the critic wins, so the generator's loss rises."""
    torch.manual_seed(0)
    made, critic = (
        nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 2)),
        nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 1)),
    )
    optimizers = [
        torch.optim.Adam(made.parameters(), lr=2e-4),
        torch.optim.Adam(critic.parameters(), lr=5e-3),
    ]
    options: dict[str, Any] = {"numerics": "light", "numerics_every": 5, "history": path}
    preamp.initialize([made, critic], optimizers, True, "O1", num_losses=2, verbosity=0, **options)
    engine = preamp.engine_of(optimizers[0])
    for loss_id in (0, 1):
        engine.scaler(loss_id).set_scale(2.0**12)
    for _ in range(150):
        real, fake = torch.randn(64, 2) / 10 + 2, made(torch.randn(64, 4))
        told = F.softplus(-critic(real).float()).mean()
        losses = (
            told + F.softplus(critic(fake.detach()).float()).mean(),
            lambda fake=fake: F.softplus(-critic(fake).float()).mean(),
        )
        for loss_id, optimizer in enumerate(reversed(optimizers)):
            loss: Any = losses[loss_id]
            loss = loss() if callable(loss) else loss
            with preamp.scale_loss(loss, optimizer, loss_id=loss_id) as scaled:
                scaled.backward()
            optimizer.step()
            for other in optimizers:
                other.zero_grad()
    engine.close()


def sparse_looks(path: Path) -> None:
    """A long run whose tensors are looked at three times."""
    x, labels = inputs()
    with training(path, net(), 1e-4, numerics_every=1000) as run:
        for _ in range(3000):
            run.step(run.classify(x, labels))


def resumed(path: Path, *, is_lost: bool = False) -> None:
    """Go on from a checkpoint at step 60, of which the last layer may get lost."""
    x, labels = inputs()
    saved = path.with_suffix(".ckpt")
    for part in (0, 1):
        with training(path, net(), 1e-2) as run:
            if part:
                preamp.load_checkpoint(saved, models=run.model, optimizers=run.optimizer)
            if part and is_lost:
                with torch.no_grad():
                    run.model.get_parameter("4.weight").mul_(-20)
            for _ in range(60):
                run.step(run.classify(x, labels))
            preamp.save_checkpoint(saved, models=run.model, optimizers=run.optimizer)


def two_runs(path: Path, *, bad: int) -> None:
    """The same script twice, with one file for both; the data of one are nan from step 41 on."""
    x, labels = inputs()
    for number in (1, 2):
        with training(path, net(), 1e-2) as run:
            for step in range(1, 61):
                run.step(run.classify(x * (math.nan if number == bad and step > 40 else 1), labels))


def one_step(path: Path) -> None:
    """A run of one step."""
    x, labels = inputs()
    with training(path, net(), 1e-2, numerics_every=1) as run:
        run.step(run.classify(x, labels))


def hinge(path: Path) -> None:
    """A loss that comes to be exactly zero, and with it all gradients."""
    x, labels = inputs()
    with training(path, net(), 1e-2, "O5") as run:
        for _ in range(200):
            run.step(F.multi_margin_loss(run.model(x).float(), labels))


def overshooting(path: Path) -> None:
    """From step 21 on the rate is far too high, and falls to nothing: the end may look well."""
    x, labels = inputs()
    random = torch.Generator().manual_seed(0)
    with training(path, net(), 1e-3, "O5") as run:
        for step in range(1, 201):
            rows = torch.randint(ROWS, (8,), generator=random)
            rate = 1e-3 if step <= 20 else 10.0 * (1 - step / 201)
            run.step(run.classify(x[rows], labels[rows]), rate)
