# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate at opt levels: the contract of a loop, and what else its script calls."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from integrations.contract import Contract
from integrations.small import START, WARNINGS, Net, batches, loss_of, make_optimizer, needs
from kit.refusals import refused

accelerate = needs("accelerate")
from preamp.integrations.accelerate import Accelerator

pytestmark = WARNINGS


def forget_accelerators() -> None:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    yield
    forget_accelerators()


class Run:
    """A training script as Accelerate's documentation has it."""

    def __init__(
        self,
        level: str,
        folder: Any = None,
        every: int = 1,
        clip: float | None = None,
        gamma: float = 1.0,
        world: int = 1,
        **options: Any,
    ) -> None:
        forget_accelerators()
        if world > 1:
            os.environ["ACCELERATE_USE_CPU"] = "true"
        self.accelerator = Accelerator(
            cpu=True,
            opt_level=level,
            options={**START, **options},
            gradient_accumulation_steps=every,
        )
        self.net = Net()
        optimizer = make_optimizer(self.net.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=gamma)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.net, optimizer, scheduler
        )
        assert type(self.model).__name__ == ("Net" if world == 1 else "DistributedDataParallel")
        self.clip, self.every = clip, every
        self.losses: list[float] = []
        self.norms: list[torch.Tensor] = []

    def run(self, data: Any, factor: float = 1.0) -> Run:
        for batch in data:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                self.accelerator.backward(loss * factor)
                if self.clip is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.clip)
                    self.norms.append(norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        assert all(norm.dtype is torch.float32 for norm in self.norms)
        assert len(self.norms) == (len(self.losses) // self.every if self.clip else 0)
        return self

    def save(self, path: Path) -> None:
        self.accelerator.save_state(str(path))

    def load(self, path: Path) -> None:
        self.accelerator.load_state(str(path))

    def state(self) -> dict[str, Any]:
        engine = preamp.engine_of(self.optimizer)
        assert engine.steps_applied > 0
        return engine.state_dict()

    def skipped(self) -> int:
        assert self.accelerator.optimizer_step_was_skipped
        return preamp.engine_of(self.net).steps_skipped

    def rate(self) -> float:
        return self.scheduler.get_last_lr()[0]


class TestAccelerate(Contract):
    Loop = Run


def test_after_a_skipped_step_the_schedule_goes_on() -> None:
    run = Run("O2", gamma=0.5, max_loss_scale=2.0**24).run(batches(1), factor=1e30)
    rate = run.rate()
    run.run(batches(8))
    assert not run.accelerator.optimizer_step_was_skipped
    assert run.rate() < rate


def test_values_are_clipped_after_unscaling() -> None:
    run = Run("O2", loss_scale=64.0)
    run.accelerator.backward(loss_of(run.model, batches(1)[0]))
    run.accelerator.clip_grad_value_(run.model.parameters(), 2.0**-6)
    run.optimizer.step()
    assert preamp.engine_of(run.model).steps_applied == 1
    for param in preamp.master_params(run.optimizer):
        state = run.optimizer.state[param]["exp_avg"]
        assert float(state.abs().max()) <= 0.1 * 2.0**-6 * 1.001


def test_evaluation_and_the_model_without_wrappers() -> None:
    run = Run("O2").run(batches(4))
    run.model.eval()
    with torch.no_grad():
        assert run.model(batches(1)[0][0]).dtype is torch.float32
    state = run.accelerator.get_state_dict(run.accelerator.unwrap_model(run.model))
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_what_cannot_work_is_refused() -> None:
    with refused("integrations", "Accelerate with mixed_precision"):
        Accelerator(cpu=True, mixed_precision="fp16")
    run, model = Run("O2"), Net()
    optimizer = make_optimizer(model.parameters())
    with refused("integrations", "an optimizer without its model", model, optimizer):
        run.accelerator.prepare(optimizer)
    with refused("integrations", "a second prepare", model, optimizer):
        run.accelerator.prepare(model, optimizer)
