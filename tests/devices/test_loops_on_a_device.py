# SPDX-License-Identifier: BSD-3-Clause
"""Loops of the documentation on a device: the host never waits, and results are the CPU's.

``delay_unscale``, a ``GradScaler``, accumulation, clips and storages, with an overflow on the way.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import WITH_MASTERS
from cases.waits import waits_refused
from preamp.optimizers import FusedAdam, FusedLAMB, FusedSGD

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

WARM_UP, STEPS = 3, 3
OVERFLOW = WARM_UP + 1  # in the steps that must not wait
LEVELS = ("O1", "O2", "O4", "O5")
STORAGES: dict[str, Any] = {
    "full": "full",
    "split": "split",
    "compact": "compact",
    "released": preamp.Storage(release_gradients=True),
}


def torch_adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "FusedAdam": lambda params: FusedAdam(params, lr=1e-2),
    "FusedLAMB": lambda params: FusedLAMB(params, lr=1e-2),
    "FusedSGD": lambda params: FusedSGD(params, lr=1e-2, momentum=0.9),
    "AdamW": torch_adamw,
}


class Training:
    """A small model whose batches are on the device already."""

    def __init__(self, device: str, optimizer: str, level: str, storage: str = "full") -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 8))
        self.net.to(device)
        self.optimizer = OPTIMIZERS[optimizer](self.net.parameters())
        released = storage == "released"
        options: dict[str, Any] = {} if released else {"loss_scale": "dynamic"}
        preamp.initialize(
            self.net, self.optimizer, opt_level=level, storage=STORAGES[storage], **options
        )
        self.engine = preamp.engine_of(self.net)
        if not released:
            self.engine.scaler(0).set_scale(64.0)
        self.scaler = None if released else preamp.GradScaler(self.optimizer)
        batches = torch.randn(WARM_UP + STEPS, 32, 16)
        factors = torch.ones(WARM_UP + STEPS)
        if not released:
            factors[OVERFLOW] = torch.inf
        self.batches, self.factors = batches.to(device).unbind(), factors.to(device).unbind()

    def loss(self, number: int) -> torch.Tensor:
        out = self.net(self.batches[number]).float()
        return (out**2).mean() * self.factors[number]

    def backward(self, loss: torch.Tensor, *, delay: bool = False) -> None:
        with preamp.scale_loss(loss, self.optimizer, delay_unscale=delay) as scaled:
            scaled.backward()

    def values(self) -> list[torch.Tensor]:
        """Weights, exactly, and the loss scale."""
        self.engine.close()
        scale = torch.tensor(self.engine.loss_scale())
        return [*(param.detach().cpu() for param in self.net.parameters()), scale]


def plain(run: Training, number: int) -> None:
    run.backward(run.loss(number))
    run.optimizer.step()


def clipped(run: Training, number: int) -> None:
    run.backward(run.loss(number))
    preamp.clip_grad_norm_(run.optimizer, 0.5)
    run.optimizer.step()


def accumulated(run: Training, number: int) -> None:
    for _ in range(2):
        run.backward(run.loss(number) / 2)
    preamp.clip_grad_norm_(run.optimizer, 0.5)
    run.optimizer.step()


def delayed(run: Training, number: int) -> None:
    run.backward(run.loss(number) / 2, delay=True)
    run.backward(run.loss(number) / 2)
    run.optimizer.step()


def by_grad_scaler(run: Training, number: int) -> None:
    scaler: Any = run.scaler
    scaler.scale(run.loss(number)).backward()
    preamp.clip_grad_norm_(run.optimizer, 0.5)
    scaler.step(run.optimizer)
    scaler.update()


def by_grad_scaler_unscaled(run: Training, number: int) -> None:
    scaler: Any = run.scaler
    scaler.scale(run.loss(number)).backward()
    scaler.unscale_(run.optimizer)
    nn.utils.clip_grad_norm_(run.net.parameters(), 0.5)
    scaler.step(run.optimizer)
    scaler.update()


Step = Callable[[Training, int], None]
LOOPS = (plain, clipped, accumulated, delayed, by_grad_scaler)


def train(run: Training, step: Step, *, refuses: bool = False) -> Training:
    """Take all steps; ``refuses`` lets CUDA raise where the host waits, once all is warm."""
    for number in range(WARM_UP + STEPS):
        with waits_refused() if refuses and number >= WARM_UP else nullcontext():
            step(run, number)
            run.optimizer.zero_grad()
    return run


def assert_as_on_the_cpu(step: Step, *what: str, refuses: bool = True) -> None:
    """Train on the device and on the CPU by ``what`` `Training` takes, and compare."""
    run = train(Training("cuda", *what), step, refuses=refuses)
    other = train(Training("cpu", *what), step)
    assert run.engine.steps_applied == other.engine.steps_applied
    assert run.engine.steps_skipped == other.engine.steps_skipped == int("released" not in what)
    for ours, wanted in zip(run.values(), other.values(), strict=True):
        torch.testing.assert_close(ours, wanted, rtol=2**-6, atol=2**-7)


@pytest.mark.parametrize("step", LOOPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("level", LEVELS)
def test_no_loop_waits(level: str, optimizer: str, step: Step) -> None:
    assert_as_on_the_cpu(step, optimizer, level)


@pytest.mark.parametrize("step", [clipped, accumulated], ids=lambda step: step.__name__)
@pytest.mark.parametrize("storage", ["split", "compact"])
@pytest.mark.parametrize("optimizer", ["FusedAdam", "FusedSGD"])
@pytest.mark.parametrize("level", WITH_MASTERS)
def test_no_storage_waits(level: str, optimizer: str, storage: str, step: Step) -> None:
    assert_as_on_the_cpu(step, optimizer, level, storage)


def test_released_gradients_wait_for_nothing() -> None:
    assert_as_on_the_cpu(plain, "FusedAdam", "O5", "released")


@pytest.mark.parametrize("level", LEVELS)
def test_after_unscale_results_are_those_of_the_cpu(level: str) -> None:
    """The host waits once for what a script did to half gradients."""
    assert_as_on_the_cpu(by_grad_scaler_unscaled, "FusedAdam", level, refuses=False)


@pytest.mark.parametrize("level", ["O1", "O5"])
def test_where_half_gradients_need_no_second_look_unscale_does_not_wait(level: str) -> None:
    """At O5 the scale is static by default, so that there is nothing to unscale."""
    run = Training("cuda", "FusedAdam", level)
    if level == "O5":
        run.engine.close()
        preamp.initialize(run.net, run.optimizer, opt_level=level)
        run.scaler = preamp.GradScaler(run.optimizer)
    train(run, by_grad_scaler_unscaled, refuses=True)
