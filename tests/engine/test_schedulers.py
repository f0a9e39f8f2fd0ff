# SPDX-License-Identifier: BSD-3-Clause
"""Schedulers pause while steps are skipped, and nobody warns of an order."""

import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as S

import preamp
from cases.host_reads import far_from_the_host
from cases.levels import LEVEL_NAMES
from kit.refusals import refused
from kit.run import Run
from preamp.fp16_utils import FP16_Optimizer, network_to_half

# Warnings are errors in all tests, so torch's warning of a wrong order would fail them.


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda o: S.StepLR(o, 1, 0.5),
    "LambdaLR": lambda o: S.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "OneCycleLR": lambda o: S.OneCycleLR(o, 0.1, total_steps=8, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: S.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: S.SequentialLR(
        o, [S.LinearLR(o, 0.25, total_iters=3), S.ExponentialLR(o, 0.5)], [3]
    ),
    "ChainedScheduler": lambda o: S.ChainedScheduler(
        [S.ConstantLR(o, 0.5, 2), S.ExponentialLR(o, 0.5)]
    ),
}


class Scheduled(Run):
    """A training with a scheduler, which is built before ``initialize`` or after it."""

    def __init__(
        self,
        make: Callable[[Any], Any] = SCHEDULERS["StepLR"],
        level: str = "O2",
        optimizer: str = "SGD",
        *,
        early: bool = True,
        **options: Any,
    ) -> None:
        options = {"loss_scale": "dynamic", **options}
        super().__init__(level, optimizer, lambda: nn.Linear(4, 2), starts=False, **options)
        inner = getattr(self.optimizer, "optim", self.optimizer)
        self.scheduler = make(inner) if early else None
        self.initialize()
        self.scheduler = self.scheduler or make(inner)

    def train(self, *, overflow: bool = False) -> None:
        self.play(f"zero; backward 0{' inf' * overflow}; step")

    @property
    def lr(self) -> float:
        return self.optimizer.param_groups[0]["lr"]


def plain_rates(make: Callable[[Any], Any], steps: int) -> list[float]:
    """The rates that a run without overflows goes through."""
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = make(optimizer)
    rates = [optimizer.param_groups[0]["lr"]]
    for _ in range(steps):
        optimizer.step()
        scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return rates


@pytest.mark.filterwarnings("ignore:The epoch parameter in:UserWarning")  # torch's, of its own
@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("by", ["preamp", "itself"])
def test_the_schedule_counts_the_steps_that_were_taken(
    name: str, level: str, early: bool, by: str
) -> None:
    """A-17: warnings are errors here; a step of its own counts, and follows a skipped one."""
    run = Scheduled(SCHEDULERS[name], level, early=early)
    rates, taken = [run.lr], []
    overflows = [True, True, False, False, True, False, False][:: 1 if by == "preamp" else 2]
    for overflow in overflows:
        run.train(overflow=overflow)
        if by == "itself":
            run.scheduler.step()
        taken.append(by == "itself" or preamp.step_scheduler(run.scheduler, run.optimizer))
        if taken[-1]:
            rates.append(run.lr)
    assert taken == [by == "itself" or not overflow for overflow in overflows]
    assert rates == plain_rates(SCHEDULERS[name], taken.count(True))


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_scheduler_before_the_optimizer_is_still_warned_about(level: str) -> None:
    with pytest.warns(UserWarning, match=r"`lr_scheduler.step\(\)` before `optimizer.step\(\)`"):
        Scheduled(level=level).scheduler.step()


@pytest.mark.parametrize("kind", [list, tuple])
def test_several_of_any_kind_get_the_metric(kind: Any) -> None:
    run = Scheduled(lambda o: S.ReduceLROnPlateau(o, factor=0.5, patience=0))
    calls, rates = list[Any](), []
    both = kind([run.scheduler, types.SimpleNamespace(step=lambda *args: calls.append(args))])
    for metric in (1.0, 2.0, 3.0):
        run.train()
        assert preamp.step_scheduler(both, run.optimizer, metric)
        rates.append(run.lr)
    assert rates == [0.1, 0.05, 0.025]
    run.train(overflow=True)
    assert not preamp.step_scheduler(both, run.optimizer, 9.0)
    assert (run.lr, calls) == (0.025, [(1.0,), (2.0,), (3.0,)])


def test_a_list_with_something_else_steps_none() -> None:
    run = Scheduled()
    run.train()
    with pytest.raises(AttributeError, match="step"):
        preamp.step_scheduler([run.scheduler, object()], run.optimizer)
    assert run.lr == 0.1


@pytest.mark.parametrize("early", [True, False])
def test_larc(early: bool) -> None:
    run = Scheduled(optimizer="LARC SGD", early=early)
    for overflow, wanted in ((True, 0.1), (False, 0.05)):
        run.train(overflow=overflow)
        assert preamp.step_scheduler(run.scheduler, run.optimizer) != overflow
        assert run.lr == wanted
    assert preamp.step_scheduler(run.scheduler, run.optimizer.optim)


def test_where_the_device_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    far_from_the_host(monkeypatch)
    run = Scheduled(optimizer="FusedAdam")
    taken = []
    for overflow in (True, False, True):
        run.train(overflow=overflow)
        taken.append(preamp.step_scheduler(run.scheduler, run.optimizer))
    assert taken == [False, True, False]
    assert run.lr == 0.005


def test_fp16_optimizer() -> None:
    model = network_to_half(nn.Linear(4, 2))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = FP16_Optimizer(inner, dynamic_loss_scale=True, verbose=False)
    scheduler = S.StepLR(inner, 1, 0.5)
    for overflow, wanted in ((True, 0.1), (False, 0.05)):
        optimizer.zero_grad()
        loss = model(torch.ones(3, 4)).float().sum() * 1e-3
        optimizer.backward(loss * math.inf if overflow else loss)
        optimizer.step()
        assert preamp.step_scheduler(scheduler, optimizer) != overflow
        assert inner.param_groups[0]["lr"] == wanted


def test_preamp_off() -> None:
    run = Scheduled(enabled=False)
    run.optimizer.step()
    assert preamp.step_scheduler(run.scheduler, run.optimizer)
    assert run.lr == 0.05


def test_training_that_cannot_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device decides, asking is when the end is noticed."""
    far_from_the_host(monkeypatch)
    run = Scheduled(optimizer="FusedAdam", max_consecutive_skips=1)
    run.train(overflow=True)
    with refused("schedulers", "a limit of skips", run.model):
        preamp.step_scheduler(run.scheduler, run.optimizer)


# -- refusals ----------------------------------------------------------------------------------


def test_refused_before_the_first_step() -> None:
    run = Scheduled()
    with refused("schedulers", "before the first step", run.model, run.optimizer):
        preamp.step_scheduler(run.scheduler, run.optimizer)
    assert run.lr == 0.1


def test_an_optimizer_without_engine() -> None:
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1)
    scheduler = S.StepLR(optimizer, 1)
    with refused("schedulers", "no engine", optimizer):
        preamp.step_scheduler(scheduler, optimizer)
