# SPDX-License-Identifier: BSD-3-Clause
"""timm's script: its ``loss_scaler`` by preamp, with timm's own models, saver and clipping."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

import preamp
from cases.levels import WITH_MASTERS
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

needs("timm.models")
import timm
import timm.optim
from timm.models import resume_checkpoint
from timm.utils import CheckpointSaver, NativeScaler

from preamp.integrations.timm import LossScaler

pytestmark = WARNINGS


class Run:
    """The part of timm's ``train_one_epoch`` that has to do with the loss."""

    def __init__(self, level: str, model: Any = None, **options: Any) -> None:
        self.model = Net() if model is None else model
        self.optimizer = make_optimizer(self.model.parameters())
        preamp.initialize(self.model, self.optimizer, opt_level=level, **START, **options)
        self.scaler = LossScaler(self.optimizer)
        self.loss: Any = loss_of
        self.losses: list[float] = []

    def run(self, data: Any, every: int = 1, factor: float = 1.0, **clip: Any) -> Run:
        for number, batch in enumerate(data, 1):
            loss = self.loss(self.model, batch)
            self.losses.append(loss.item())
            self.scaler(
                loss * factor / every,
                self.optimizer,
                parameters=self.model.parameters(),
                need_update=number % every == 0,
                **clip,
            )
            if number % every == 0:
                self.optimizer.zero_grad()
        return self


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_is_that_of_a_loop_by_hand(level: str, every: int) -> None:
    data = batches(12)
    run = Run(level).run(data, every, clip_grad=0.5)
    hand = ByHand(level).run(data, every=every, clip=0.5)
    assert run.losses == hand.losses
    assert_same_models(run.model, hand.model)


@pytest.mark.parametrize("level", LEVELS)
def test_losses_are_those_of_a_float32_run(level: str) -> None:
    data = batches(30)
    run = Run(level, **without_skips(level)).run(data, clip_grad=0.5)
    assert run.losses == near(plain_losses(data, 0.5), level)


@pytest.mark.parametrize("level", LEVELS)
def test_resumed_from_timms_checkpoint_a_run_goes_on_to_the_bit(level: str, tmp_path: Path) -> None:
    data = batches(12)
    run = Run(level).run(data[:6])
    saver = CheckpointSaver(
        run.model,
        run.optimizer,
        args=Namespace(model="net"),
        amp_scaler=run.scaler,
        checkpoint_dir=str(tmp_path),
        recovery_dir=str(tmp_path),
    )
    saver.save_checkpoint(0, metric=1.0)
    run.run(data[6:])
    again = Run(level)
    epoch = resume_checkpoint(
        again.model, str(tmp_path / "last.pth.tar"), again.optimizer, again.scaler
    )
    assert epoch == 1
    again.run(data[6:])
    assert again.losses == run.losses[6:]
    assert_same_models(again.model, run.model)
    assert again.scaler.state_dict() == run.scaler.state_dict()


def test_the_state_of_timms_own_scaler_is_taken() -> None:
    run, state = Run("O2"), NativeScaler(device="cpu").state_dict()
    if state:  # where torch enables it
        run.scaler.load_state_dict({**state, "scale": 512.0})
        assert preamp.engine_of(run.model).loss_scale() == 512.0


def test_a_skipped_step_changes_nothing() -> None:
    run = Run("O2")
    before = exact(run.model)
    run.run(batches(1), factor=1e30, clip_grad=1.0)
    for name, value in exact(run.model).items():
        assert_same(value, before[name])
    assert preamp.engine_of(run.model).steps_skipped == 1


@pytest.mark.parametrize("mode", ["value", "agc"])
@pytest.mark.parametrize("given", [True, False], ids=["parameters", "none"])
def test_values_are_clipped_and_adaptively(mode: str, given: bool) -> None:
    limit = 2.0**-6
    run = Run("O1", loss_scale=64.0)
    plain, data = Net(), batches(1)
    loss_of(plain, data[0]).backward()
    timm.utils.dispatch_clip_grad(plain.parameters(), limit, mode=mode)
    loss = loss_of(run.model, data[0])
    params = run.model.parameters() if given else None
    run.scaler(loss, run.optimizer, clip_grad=limit, clip_mode=mode, parameters=params)
    for ours, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=1e-4)


def test_an_unknown_mode_is_refused() -> None:
    run = Run("O2")
    with pytest.raises(ValueError, match="'norm', 'value', 'agc'"):
        run.scaler(loss_of(run.model, batches(1)[0]), run.optimizer, clip_mode="sum")


@pytest.mark.parametrize("level", WITH_MASTERS)
def test_a_model_of_timm_learns_under_its_optimizer_and_average(level: str) -> None:
    torch.manual_seed(0)
    model = timm.create_model("test_resnet", num_classes=4, in_chans=3)
    optimizer = timm.optim.create_optimizer_v2(model, opt="lamb", lr=0.02, weight_decay=0.01)
    preamp.initialize(model, optimizer, opt_level=level, **START)
    scaler = LossScaler(optimizer)
    average = timm.utils.ModelEmaV3(model, decay=0.9)
    x, y = torch.randn(8, 3, 64, 64), torch.arange(8) % 4
    losses: list[float] = []
    for _ in range(12):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        losses.append(loss.item())
        scaler(loss, optimizer, clip_grad=1.0, parameters=timm.models.model_parameters(model))
        optimizer.zero_grad()
        average.update(model)
    assert losses[-1] < 0.7 * losses[0]
    assert {v.dtype for v in average.module.state_dict().values() if v.is_floating_point()} == {
        torch.float32
    }


def on_two(rank: int) -> dict[str, Any]:
    torch.distributed.init_process_group("gloo")
    data = batches(24)[rank::2]
    found: dict[str, Any] = {}
    for level in LEVELS:
        models: list[Any] = []
        for loop in (Run(level), ByHand(level)):
            wrapped = torch.nn.parallel.DistributedDataParallel(loop.model)
            loop.loss = lambda _, batch, wrapped=wrapped: loss_of(wrapped, batch)
            options = {"clip_grad" if isinstance(loop, Run) else "clip": 0.5}
            models.append(loop.run(data, every=3, **options).model)
        assert_same_models(*models)
        found[level] = list(bits(exact(models[0]).values()))
    return found


def test_two_processes_train_one_model(tmp_path: Path) -> None:
    one, other = fork_ranks(on_two, tmp_path)
    assert one == other
