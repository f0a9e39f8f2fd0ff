# SPDX-License-Identifier: BSD-3-Clause
"""What a training loop of any framework promises at opt levels: each runs this contract."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import preamp
from cases.tolerances import assert_same
from integrations.small import (
    LEVELS,
    ByHand,
    Net,
    assert_same_models,
    batches,
    bits,
    exact,
    fork_ranks,
    near,
    plain_losses,
    without_skips,
)


class ByScript:
    """What is asked of a loop whose script owns the model, the optimizer and the schedule."""

    net: Any
    optimizer: Any
    scheduler: Any

    def skipped(self) -> int:
        return preamp.engine_of(self.net).steps_skipped

    def rate(self) -> float:
        preamp.step_scheduler(self.scheduler, self.optimizer)
        return self.scheduler.get_last_lr()[0]


class Contract:
    """A test class of a framework derives from this, and says its ``Loop``.

    That trains a `small.Net`, its ``net``, as the framework's documentation has it, and notes the
    ``losses``. It is made with a level, a folder and, by name, ``every`` (batches for a step),
    ``clip`` (a norm), ``gamma`` (of a schedule), ``world`` (processes) and options of
    ``preamp.initialize``. ``run(data, factor)`` trains on all batches, ``save(path)`` and
    ``load(path)`` are the framework's own, ``state()`` is what it saves of the engine, and
    ``skipped()`` and ``rate()`` are asked after a run.
    """

    Loop: ClassVar[Any]
    clip: ClassVar[float | None] = 0.5
    clip_by_hand: ClassVar[float | None] = 0.5
    """Norms that gradients are clipped to, and where that has a loop by hand's numbers."""

    @pytest.mark.parametrize("every", [1, 2])
    @pytest.mark.parametrize("level", LEVELS)
    def test_a_run_is_that_of_a_loop_by_hand(self, level: str, every: int, tmp_path: Path) -> None:
        data = batches(12)
        run = self.Loop(level, tmp_path, every=every, clip=self.clip_by_hand).run(data)
        hand = ByHand(level).run(data, every=every, clip=self.clip_by_hand)
        assert run.losses == hand.losses
        assert_same_models(run.net, hand.model)

    @pytest.mark.parametrize("level", LEVELS)
    def test_losses_are_those_of_a_float32_run(self, level: str, tmp_path: Path) -> None:
        data = batches(30)
        run = self.Loop(level, tmp_path, clip=self.clip, **without_skips(level)).run(data)
        wanted = plain_losses(data, self.clip or 1e9)
        assert wanted[-1] < 0.5 * wanted[0]
        assert run.losses == near(wanted, level)

    @pytest.mark.parametrize("level", LEVELS)
    def test_a_resumed_run_goes_on_to_the_bit(self, level: str, tmp_path: Path) -> None:
        data = batches(12)
        run = self.Loop(level, tmp_path, clip=self.clip).run(data[:6])
        run.save(tmp_path / "file")
        run.run(data[6:])
        again = self.Loop(level, tmp_path, clip=self.clip)
        with torch.no_grad():
            for param in again.net.parameters():
                param.zero_()
        again.load(tmp_path / "file")
        again.run(data[6:])
        assert again.losses == run.losses[6:]
        assert_same_models(again.net, run.net)
        assert again.state() == run.state()

    @pytest.mark.parametrize("level", ["O1", "O2"])
    def test_a_skipped_step_changes_nothing_and_a_schedule_waits(
        self, level: str, tmp_path: Path
    ) -> None:
        run = self.Loop(level, tmp_path, gamma=0.5, clip=self.clip, max_loss_scale=2.0**24)
        before = exact(run.net)
        run.run(batches(1), factor=1e30)
        for name, value in exact(run.net).items():
            assert_same(value, before[name])
        assert run.skipped() == 1
        assert run.rate() == 0.02

    def test_off_it_is_a_float32_run(self, tmp_path: Path) -> None:
        data = batches(6)
        run = self.Loop("O2", tmp_path, clip=self.clip, enabled=False).run(data)
        assert run.losses == plain_losses(data, self.clip or 1e9)

    def test_two_processes_train_one_model(self, tmp_path: Path) -> None:
        def train(rank: int) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for level in ("O1", "O2"):
                run = self.Loop(level, Path(), every=2, clip=self.clip, world=2)
                run.run(batches(8, seed=rank))
                found[level] = list(bits(exact(run.net).values()))
                if preamp.engine.find_engine(run.net) is not None:
                    preamp.engine_of(run.net).close()
            return found

        first, second = fork_ranks(train, tmp_path)
        assert first == second
        alone = ByHand("O2").run(batches(8), every=2, clip=self.clip)
        assert list(bits(exact(alone.model).values())) != first["O2"]
        assert list(bits(exact(Net()).values())) != first["O2"]
