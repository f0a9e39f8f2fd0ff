# SPDX-License-Identifier: BSD-3-Clause
"""Accelerate at opt levels: the numbers of a loop by hand, its checkpoints, its schedulers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from cases.tolerances import assert_same
from integrations.small import (
    LEVELS,
    START,
    WARNINGS,
    ByHand,
    Net,
    assert_same_models,
    batches,
    bits,
    exact,
    fork_ranks,
    loss_of,
    make_optimizer,
    near,
    needs,
    plain_losses,
    without_skips,
)
from kit.refusals import refused

accelerate = needs("accelerate")
from preamp.integrations.accelerate import Accelerator

pytestmark = WARNINGS


@pytest.fixture(autouse=True)
def no_accelerator_left() -> Iterator[None]:
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """A training script as Accelerate's documentation has it."""

    def __init__(self, level: str, every: int = 1, **options: Any) -> None:
        self.accelerator = Accelerator(
            cpu=True,
            opt_level=level,
            options={**START, **options},
            gradient_accumulation_steps=every,
        )
        model = Net()
        optimizer = make_optimizer(model.parameters())
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5 if options else 1.0)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            model, optimizer, scheduler
        )
        self.losses: list[float] = []
        self.norms: list[torch.Tensor] = []

    def run(self, data: Any, clip: float | None = None, factor: float = 1.0) -> Run:
        for batch in data:
            with self.accelerator.accumulate(self.model):
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                self.accelerator.backward(loss * factor)
                if clip is not None and self.accelerator.sync_gradients:
                    norm = self.accelerator.clip_grad_norm_(self.model.parameters(), clip)
                    self.norms.append(norm)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_that_of_a_loop_by_hand(level: str, every: int) -> None:
    data = batches(12)
    run = Run(level, every).run(data, clip=0.5)
    hand = ByHand(level).run(data, every=every, clip=0.5)
    assert run.losses == hand.losses
    assert_same_models(run.model, hand.model)
    assert all(norm.dtype is torch.float32 for norm in run.norms)
    assert len(run.norms) == 12 // every


@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_those_of_accelerates_own_float32_run(level: str) -> None:
    data = batches(30)
    own = accelerate.Accelerator(cpu=True)
    model = Net()
    model, optimizer = own.prepare(model, make_optimizer(model.parameters()))
    wanted: list[float] = []
    for batch in data:
        loss = loss_of(model, batch)
        wanted.append(loss.item())
        own.backward(loss)
        own.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert wanted == plain_losses(data, 1.0)
    # Left as they are by the first skips of a dynamic loss scale
    run = Run(level, **without_skips(level))
    run.scheduler.scheduler.gamma = 1.0
    run.run(data, clip=1.0)
    assert wanted[-1] < 0.5 * wanted[0]
    assert run.losses == near(wanted, level)


@pytest.mark.parametrize("level", LEVELS)
def test_resumed_from_its_checkpoint_a_run_goes_on_to_the_bit(level: str, tmp_path: Path) -> None:
    data = batches(12)
    run = Run(level).run(data[:6], clip=0.5)
    run.accelerator.save_state(str(tmp_path))
    run.run(data[6:], clip=0.5)
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    again = Run(level)
    with torch.no_grad():
        again.model.first.weight.zero_()
    again.accelerator.load_state(str(tmp_path))
    again.run(data[6:], clip=0.5)
    assert again.losses == run.losses[6:]
    assert_same_models(again.model, run.model)
    one, other = preamp.engine_of(run.model), preamp.engine_of(again.optimizer)
    assert one.state_dict() == other.state_dict()
    assert one.steps_applied > 0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_skipped_step_is_none(level: str) -> None:
    run = Run(level, max_loss_scale=2.0**24)
    rate = run.scheduler.get_last_lr()
    before = exact(run.model)
    run.run(batches(1), factor=1e30)
    assert run.accelerator.optimizer_step_was_skipped
    assert run.scheduler.get_last_lr() == rate
    for name, value in exact(run.model).items():
        assert_same(value, before[name])
    assert preamp.engine_of(run.model).steps_skipped == 1
    run.run(batches(8))
    assert not run.accelerator.optimizer_step_was_skipped
    assert run.scheduler.get_last_lr() < rate


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
        out = run.model(batches(1)[0][0])
    assert out.dtype is torch.float32
    bare = run.accelerator.unwrap_model(run.model)
    state = run.accelerator.get_state_dict(bare)
    assert {value.dtype for value in state.values()} == {torch.float32}


def test_what_cannot_work_is_refused() -> None:
    with refused("integrations", "Accelerate with mixed_precision"):
        Accelerator(cpu=True, mixed_precision="fp16")
    run = Run("O2")
    model = Net()
    optimizer = make_optimizer(model.parameters())
    with refused("integrations", "an optimizer without its model", model, optimizer):
        run.accelerator.prepare(optimizer)
    with refused("integrations", "a second prepare", model, optimizer):
        run.accelerator.prepare(model, optimizer)


def test_off_it_is_accelerates_own() -> None:
    data = batches(6)
    run = Run("O2", enabled=False)
    run.scheduler.scheduler.gamma = 1.0
    assert run.run(data, clip=0.5).losses == plain_losses(data, 0.5)


def train_on_two(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    os.environ["ACCELERATE_USE_CPU"] = "true"
    for level in ("O1", "O2"):
        run = Run(level, every=2)
        found[f"{level} wrapped"] = type(run.model).__name__
        run.run(batches(8, seed=rank), clip=0.5)
        found[level] = list(bits(exact(run.accelerator.unwrap_model(run.model)).values()))
        preamp.engine_of(run.model).close()
        run.accelerator.free_memory()
    return found


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    first, second = fork_ranks(train_on_two, tmp_path)
    assert first == second
    assert first["O2 wrapped"] == "DistributedDataParallel"
    alone = ByHand("O2").run(batches(8), every=2, clip=0.5)
    assert list(bits(exact(alone.model).values())) != first["O2"]
