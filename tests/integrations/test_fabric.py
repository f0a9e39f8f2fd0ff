# SPDX-License-Identifier: BSD-3-Clause
"""Fabric at opt levels: the numbers of a loop by hand, and its checkpoints."""

from __future__ import annotations

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

needs("lightning.fabric")
from lightning.fabric import Fabric

from preamp.integrations.lightning import FabricPrecision

pytestmark = WARNINGS


class Run:
    def __init__(self, level: str, strategy: Any = "auto", devices: int = 1, **options: Any):
        self.precision = FabricPrecision()
        self.fabric = Fabric(
            accelerator="cpu", strategy=strategy, devices=devices, plugins=self.precision
        )
        self.fabric.launch()
        self.bare = Net()
        optimizer = make_optimizer(self.bare.parameters())
        preamp.initialize(self.bare, optimizer, opt_level=level, **START, **options)
        self.model, self.optimizer = self.fabric.setup(self.bare, optimizer)
        self.losses: list[float] = []
        self.norms: list[float] = []

    def run(self, data: Any, clip: float | None = None, every: int = 1, factor: float = 1) -> Run:
        for number, batch in enumerate(data, 1):
            is_last = number % every == 0
            with self.fabric.no_backward_sync(self.model, enabled=not is_last):
                loss = loss_of(self.model, batch)
                self.losses.append(loss.item())
                self.fabric.backward(loss * factor / every)
            if is_last:
                if clip is not None:
                    norm = self.fabric.clip_gradients(
                        self.model, self.optimizer, max_norm=clip, error_if_nonfinite=False
                    )
                    self.norms.append(float(norm))
                self.optimizer.step()
                self.optimizer.zero_grad()
        return self

    def run_every_second(self, data: Any) -> Run:
        for number, batch in enumerate(data):
            self.fabric.backward(loss_of(self.model, batch))
            if number % 2:
                self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_that_of_a_loop_by_hand(level: str, every: int) -> None:
    data = batches(12)
    run = Run(level).run(data, every=every)
    hand = ByHand(level).run(data, every=every)
    assert run.losses == hand.losses
    assert_same_models(run.bare, hand.model)


@pytest.mark.parametrize("level", LEVELS)
def test_a_discarded_batch_leaves_no_gradients(level: str) -> None:
    data = batches(8)
    run = Run(level, loss_scale=128.0).run_every_second(data)
    hand = ByHand(level, loss_scale=128.0).run(data[1::2])
    assert_same_models(run.bare, hand.model)


@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_those_of_the_float32_run(level: str) -> None:
    data = batches(30)
    run = Run(level, **without_skips(level)).run(data, clip=0.5)
    assert run.losses == near(plain_losses(data, 0.5), level)
    assert all(0.5 < norm < 20 for norm in run.norms[:5])


@pytest.mark.parametrize("level", LEVELS)
def test_a_resumed_run_goes_on_to_the_bit(level: str, tmp_path: Path) -> None:
    data = batches(12)
    run = Run(level).run(data[:6], clip=0.5)
    extra = run.precision.state_dict()
    run.fabric.save(tmp_path / "file.ckpt", {**run.state(), "precision": extra})
    run.run(data[6:], clip=0.5)
    again = Run(level)
    rest = again.fabric.load(tmp_path / "file.ckpt", again.state())
    again.precision.load_state_dict(rest["precision"])
    again.run(data[6:], clip=0.5)
    assert again.losses == run.losses[6:]
    assert_same_models(again.bare, run.bare)
    assert again.precision.state_dict() == run.precision.state_dict()


def test_a_skipped_step_changes_nothing() -> None:
    run = Run("O2")
    before = exact(run.bare)
    run.run(batches(1), factor=1e30, clip=0.5)
    for name, value in exact(run.bare).items():
        assert_same(value, before[name])
    scheduler = torch.optim.lr_scheduler.StepLR(run.optimizer.optimizer, 1)
    assert not preamp.step_scheduler(scheduler, run.optimizer)


def test_preamps_names_look_into_fabrics_wrappers() -> None:
    run = Run("O2", loss_scale=64.0)
    run.fabric.backward(loss_of(run.model, batches(1)[0]))
    assert preamp.clip_grad_norm_(run.optimizer, 1e9) > 0
    assert preamp.clip_grad_norm_(run.model.parameters(), 1e9) > 0
    assert preamp.engine_of(run.model) is preamp.engine_of(run.optimizer)


def test_a_model_without_an_engine_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1, plugins=FabricPrecision())
    model = Net()
    model, _ = fabric.setup(model, make_optimizer(model.parameters()))
    with refused("integrations", "Fabric without an engine"):
        fabric.backward(loss_of(model, batches(1)[0]))


def on_two(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for level in ("O1", "O2"):
        run = Run(level, "ddp", 2)
        run.run(batches(8, seed=rank), clip=0.5, every=2)
        found[level] = list(bits(exact(run.bare).values()))
        found[f"{level} norms"] = run.norms
        preamp.engine_of(run.bare).close()
    return found


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    first, second = fork_ranks(on_two, tmp_path)
    assert str(first) == str(second)
    assert list(bits(exact(Net()).values())) != first["O2"]
