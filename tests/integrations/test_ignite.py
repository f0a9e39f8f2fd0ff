# SPDX-License-Identifier: BSD-3-Clause
"""ignite: its supervised trainer with preamp's scaler, and the one it has for Apex."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

import preamp
from integrations.contract import (
    WARNINGS,
    ByHand,
    ByScript,
    Contract,
    Net,
    assert_same_models,
    batches,
    fork_ranks,
    make_optimizer,
    needs,
)

needs("ignite.engine")
import ignite.distributed as idist
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver
from ignite.metrics import Loss

pytestmark = WARNINGS


def mse(found: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(found.float(), y)


class Run(ByScript):
    def build(self) -> None:
        if self.world > 1 and idist.backend() is None:
            idist.initialize("gloo")
        self.net: Any = Net()
        self.optimizer = make_optimizer(self.net.parameters())
        preamp.initialize(self.net, self.optimizer, opt_level=self.level, **self.options)
        self.scaler, self.factor = preamp.GradScaler(self.optimizer), 1.0
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=self.gamma)
        self.trainer = create_supervised_trainer(
            idist.auto_model(self.net),  # DistributedDataParallel on several processes
            self.optimizer,
            lambda found, y: mse(found, y) * self.factor,
            gradient_accumulation_steps=self.every,
            amp_mode="amp",
            scaler=self.scaler,
        )
        self.trainer.add_event_handler(
            Events.ITERATION_COMPLETED, lambda engine: self.losses.append(engine.state.output)
        )

    def run(self, data: Any, factor: float = 1.0) -> Run:
        self.factor = factor
        self.trainer.run(data, max_epochs=1)
        return self

    def parts(self) -> dict[str, Any]:
        return {"model": self.net, "optimizer": self.optimizer, "scaler": self.scaler}

    def save(self, path: Path) -> None:
        Checkpoint(self.parts(), DiskSaver(str(path), require_empty=False))(self.trainer)

    def load(self, path: Path) -> None:
        (file,) = path.glob("*.pt")
        Checkpoint.load_objects(self.parts(), torch.load(file, weights_only=True))

    def state(self) -> dict[str, Any]:
        return self.scaler.state_dict()


class TestIgnite(Contract):
    Loop = Run
    clip = clip_by_hand = None


def test_evaluation_runs() -> None:
    run = Run("O2").run(batches(1))
    metrics = {"mse": Loss(torch.nn.functional.mse_loss)}
    evaluator = create_supervised_evaluator(run.net, metrics, amp_mode=None)
    assert evaluator.run(batches(1)).metrics["mse"] > 0


def test_the_mode_for_apex_works_through_the_alias(tmp_path: Path) -> None:
    def as_with_apex(rank: int) -> bool:
        preamp.install_apex_alias()
        amp: Any = importlib.import_module("apex.amp")
        model = Net()
        optimizer = make_optimizer(model.parameters())
        model, optimizer = amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
        trainer = create_supervised_trainer(
            model, optimizer, mse, amp_mode="apex", gradient_accumulation_steps=2
        )
        data = batches(12)
        trainer.run(data, max_epochs=1)
        assert_same_models(model, ByHand("O2").run(data, every=2).model)
        return preamp.engine_of(model).steps_applied > 0

    assert fork_ranks(as_with_apex, tmp_path, 1) == [True]
