# SPDX-License-Identifier: BSD-3-Clause
"""ignite: its supervised trainer with preamp's scaler, and the one it has for Apex."""

from __future__ import annotations

import importlib
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

needs("ignite.engine")
import ignite.distributed as idist
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Loss

pytestmark = WARNINGS


class Run:
    def __init__(self, level: str, every: int = 1, mode: str = "amp", **options: Any) -> None:
        self.model: Any = Net()
        self.optimizer = make_optimizer(self.model.parameters())
        preamp.initialize(self.model, self.optimizer, opt_level=level, **START, **options)
        called = idist.auto_model(self.model)  # DistributedDataParallel on several processes
        self.scaler = preamp.GradScaler(self.optimizer)
        given: Any = {"amp_mode": mode}
        if mode == "amp":
            given["scaler"] = self.scaler
        self.losses: list[float] = []
        self.trainer = create_supervised_trainer(
            called,
            self.optimizer,
            lambda found, y: torch.nn.functional.mse_loss(found.float(), y),
            gradient_accumulation_steps=every,
            **given,
        )
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.losses.append(engine.state.output)
        )

    def run(self, data: Any) -> Run:
        self.trainer.run(data, max_epochs=1)
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scaler": self.scaler}


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_that_of_a_loop_by_hand(level: str, every: int) -> None:
    data = batches(12)
    run = Run(level, every).run(data)
    hand = ByHand(level).run(data, every=every)
    assert run.losses == hand.losses
    assert_same_models(run.model, hand.model)


@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_those_of_a_float32_run(level: str) -> None:
    data = batches(30)
    run = Run(level, **without_skips(level)).run(data)
    assert run.losses == near(plain_losses(data, 1e9), level)


@pytest.mark.parametrize("level", LEVELS)
def test_resumed_from_ignites_checkpoint_a_run_goes_on_to_the_bit(
    level: str, tmp_path: Path
) -> None:
    data = batches(12)
    run = Run(level).run(data[:6])
    saver = Checkpoint(run.parts(), DiskSaver(str(tmp_path), require_empty=False))
    saver(run.trainer)
    (file,) = tmp_path.glob("*.pt")
    run.run(data[6:])
    again = Run(level)
    Checkpoint.load_objects(again.parts(), torch.load(file, weights_only=True))
    again.run(data[6:])
    assert again.losses == run.losses[6:]
    assert_same_models(again.model, run.model)
    assert again.scaler.state_dict() == run.scaler.state_dict()


def test_a_skipped_step_changes_nothing_and_evaluation_runs() -> None:
    run = Run("O2")
    before = exact(run.model)
    x, y = batches(1)[0]
    run.run([(x, y * 1e20)])
    for name, value in exact(run.model).items():
        assert_same(value, before[name])
    assert preamp.engine_of(run.model).steps_skipped == 1
    evaluator = create_supervised_evaluator(
        run.model, {"mse": Loss(torch.nn.functional.mse_loss)}, amp_mode=None
    )
    assert evaluator.run([(x, y)]).metrics["mse"] > 0


def as_with_apex(rank: int) -> bool:
    preamp.install_apex_alias()
    amp: Any = importlib.import_module("apex.amp")
    model = Net()
    optimizer = make_optimizer(model.parameters())
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    trainer = create_supervised_trainer(
        model,
        optimizer,
        lambda found, y: torch.nn.functional.mse_loss(found.float(), y),
        amp_mode="apex",
        gradient_accumulation_steps=2,
    )
    data = batches(12)
    trainer.run(data, max_epochs=1)
    assert_same_models(model, ByHand("O2").run(data, every=2).model)
    return preamp.engine_of(model).steps_applied > 0


def test_the_mode_for_apex_works_through_the_alias(tmp_path: Path) -> None:
    assert fork_ranks(as_with_apex, tmp_path, 1) == [True]


def on_two(rank: int) -> dict[str, Any]:
    idist.initialize("gloo")
    data = batches(24)[rank::2]
    found: dict[str, Any] = {}
    for level in LEVELS:
        run, hand = Run(level, 2).run(data), ByHand(level)
        wrapped = torch.nn.parallel.DistributedDataParallel(hand.model)
        hand.loss = lambda _, batch, wrapped=wrapped: loss_of(wrapped, batch)
        hand.run(data, every=2)
        assert run.losses == hand.losses
        assert_same_models(run.model, hand.model)
        found[level] = list(bits(exact(run.model).values()))
    return found


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    one, other = fork_ranks(on_two, tmp_path)
    assert one == other
