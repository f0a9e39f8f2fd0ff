# SPDX-License-Identifier: BSD-3-Clause
"""Loops as people write them for ``torch.amp``: one changed line, and the losses of float32."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import preamp
from cases.levels import BY_NAME

LEVELS = ("O1", "O2", "O4", "O5")
Make = Callable[..., Any]
"""Given models and optimizers, returns a scaler for each optimizer: what differs between runs."""


def float32(models: Any, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
    del models
    return [torch.amp.GradScaler("cpu", enabled=False) for _ in optimizers]


def at_level(level: str) -> Make:
    def make(models: Any, optimizers: list[torch.optim.Optimizer]) -> list[Any]:
        preamp.initialize(
            models, optimizers, opt_level=level, num_losses=len(optimizers), verbosity=0
        )
        numbers: dict[str, Any] = (
            {"init_scale": 2.0**10} if BY_NAME[level].half is torch.float16 else {}
        )
        return [preamp.GradScaler(o, loss_id=i, **numbers) for i, o in enumerate(optimizers)]

    return make


def net(inputs: int, outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    first, last = nn.Linear(inputs, 32), nn.Linear(32, outputs)
    return nn.Sequential(first, nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.ReLU(), last)


def batches(count: int, seed: int = 0) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        x = torch.randn(32, 8, generator=generator)
        yield x, x.sum(1, keepdim=True).sin()


# -- the loops -----------------------------------------------------------------------------------


def accumulation_clipping_and_a_schedule(make: Make) -> list[float]:
    model = net(8, 1, 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    (scaler,) = make(model, [optimizer])
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    losses: list[float] = []
    for number, (x, y) in enumerate(batches(80), 1):
        loss = F.mse_loss(model(x), y)
        losses.append(loss.item())
        scaler.scale(loss / 4).backward()
        if number % 4 == 0:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scale <= scaler.get_scale():  # the usual test for a step that was taken
                schedule.step()
            optimizer.zero_grad()
    return losses


def two_networks_with_a_scaler_each(make: Make) -> list[float]:
    models = [net(4, 8, 1), net(8, 1, 2)]
    optimizers = [torch.optim.Adam(m.parameters(), lr=2e-3, betas=(0.5, 0.9)) for m in models]
    (make_fake, judge), (generator, discriminator) = models, optimizers
    scalers = make(models, optimizers)
    noise = torch.Generator().manual_seed(3)
    real, fake = torch.ones(32, 1), torch.zeros(32, 1)
    losses: list[float] = []
    for x, _ in batches(60):
        made = make_fake(torch.randn(32, 4, generator=noise))
        discriminator.zero_grad()
        loss = F.binary_cross_entropy_with_logits(judge(x), real)
        loss = loss + F.binary_cross_entropy_with_logits(judge(made.detach()), fake)
        scalers[1].scale(loss).backward()
        scalers[1].step(discriminator)
        scalers[1].update()
        generator.zero_grad()
        deceived = F.binary_cross_entropy_with_logits(judge(made), real)
        scalers[0].scale(deceived).backward()
        scalers[0].step(generator)
        scalers[0].update()
        losses.append(loss.item() + deceived.item())
    return losses


LOOPS = (accumulation_clipping_and_a_schedule, two_networks_with_a_scaler_each)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loop", LOOPS)
def test_losses_are_those_of_float32(loop: Callable[[Make], list[float]], level: str) -> None:
    wanted, found = loop(float32), loop(at_level(level))
    half = BY_NAME[level].half
    assert found == pytest.approx(wanted, rel=0.02 if half is torch.float16 else 0.1)
