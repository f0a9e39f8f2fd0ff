# SPDX-License-Identifier: BSD-3-Clause
"""Runs: equal starts, equal batches, and every way in which a training can end."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable

import pytest
import torch

import preamp
from cases.demo import CORPUS, config
from preamp.demo import run as run_module
from preamp.demo import train as train_module
from preamp.demo.config import DEFAULT_LEVELS, DemoConfig, OptimizerConfig
from preamp.demo.data import Batch
from preamp.demo.model import GPT
from preamp.demo.run import prepare, run, warmup_steps
from preamp.demo.train import DivergedError, Progress, Tape, Watcher, set_learning_rate
from preamp.numerics import History, MemoryRecord, OverflowRecord, RunRecord, StepRecord


class Interrupter(Watcher):
    """Presses Ctrl-C after a step."""

    def __init__(self, level: str, step: int) -> None:
        self.level, self.step = level, step

    def step_done(self, progress: Progress) -> None:
        if (progress.level, progress.step) == (self.level, self.step):
            raise KeyboardInterrupt


def test_default_levels_are_all_levels() -> None:
    assert sorted(DEFAULT_LEVELS) == sorted(preamp.OPT_LEVELS)


def test_every_level_runs_and_learns_the_same() -> None:
    result = run(prepare(config(*preamp.OPT_LEVELS, steps=12), CORPUS), Watcher())
    assert [row.level for row in result.levels] == list(preamp.OPT_LEVELS)
    for row in result.levels:
        assert (row.status, row.steps_done, len(row.losses)) == ("finished", 12, 12)
        assert row.losses[-1] < row.losses[0]
        assert row.memory is not None
        assert row.dtypes is not None
        assert row.held_out_bits is not None
    base = result.levels[0].held_out_bits
    for row in result.levels:
        if row.level != "O3":
            assert row.held_out_bits == pytest.approx(base, rel=0.01)


def test_every_level_gets_the_same_weights_and_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: list[dict[str, torch.Tensor]] = []
    texts: list[torch.Tensor] = []
    make_optimizer, train = run_module.make_optimizer, run_module.train

    def note_weights(model: GPT, settings: OptimizerConfig, **rest: bool) -> torch.optim.Optimizer:
        weights.append(copy.deepcopy(model.state_dict()))
        return make_optimizer(model, settings, **rest)

    def note_batches(model, optimizer, batches, config, **rest) -> None:
        noted: list[Batch] = list(batches)
        texts.append(torch.stack([batch.inputs for batch in noted]))
        train(model, optimizer, iter(noted), config, **rest)

    monkeypatch.setattr(run_module, "make_optimizer", note_weights)
    monkeypatch.setattr(run_module, "train", note_batches)
    run(prepare(config("O0", "O5", "O1"), CORPUS), Watcher())
    assert len(weights) == len(texts) == 3
    for other in weights[1:]:
        assert all(torch.equal(value, other[name]) for name, value in weights[0].items())
    assert all(torch.equal(texts[0], other) for other in texts[1:])


def test_two_runs_are_the_same_to_the_bit() -> None:
    first, second = (run(prepare(config("O2"), CORPUS), Watcher()) for _ in range(2))
    assert first.levels[0].losses == second.levels[0].losses
    assert first.levels[0].held_out_bits == second.levels[0].held_out_bits


def test_interrupt_keeps_finished_rows_and_what_the_current_one_has() -> None:
    setting = prepare(config("O0", "O5", "O1"), CORPUS)
    result = run(setting, Interrupter("O5", 4))
    assert result.interrupted
    assert [(row.level, row.status) for row in result.levels] == [
        ("O0", "finished"),
        ("O5", "interrupted"),
    ]
    assert result.levels[0].held_out_bits is not None
    assert result.levels[1].steps_done == 4
    assert result.levels[1].held_out_bits is None
    assert result.levels[1].memory is not None


def test_interrupt_between_two_levels_keeps_the_rows() -> None:
    class Between(Watcher):
        def level_started(self, level: str) -> None:
            if level == "O5":
                raise KeyboardInterrupt

    result = run(prepare(config("O0", "O5"), CORPUS), Between())
    assert result.interrupted
    assert [row.level for row in result.levels] == ["O0"]


def test_interrupt_during_the_evaluation_keeps_the_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_args: object) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "held_out_bits", interrupt)
    result = run(prepare(config("O0", "O5"), CORPUS), Watcher())
    (row,) = result.levels
    assert (row.status, row.steps_done) == ("interrupted", 6)
    assert row.dtypes is not None


def fail_with(error: Exception) -> Callable[..., None]:
    def train(*_args: object, **_kwargs: object) -> None:
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (preamp.LossScaleError("too many skips"), "refused"),
        (DivergedError("not finite"), "diverged"),
    ],
)
def test_level_that_fails_is_a_row_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, error: Exception, status: str
) -> None:
    train = run_module.train
    failures = iter([fail_with(error), train])
    monkeypatch.setattr(run_module, "train", lambda *args, **rest: next(failures)(*args, **rest))
    result = run(prepare(config("O1", "O0"), CORPUS), Watcher())
    assert [row.status for row in result.levels] == [status, "finished"]
    assert result.levels[0].reason == str(error)
    assert not result.interrupted


def test_loss_may_be_infinite_for_a_while_but_not_for_good() -> None:
    tape = Tape(level="O1")
    for loss in (1.0, math.inf, math.nan, math.inf, math.nan, 2.0, *[math.nan] * 4):
        tape.add(loss, 0.1)
    with pytest.raises(DivergedError, match="the loss is not finite from step 7 on"):
        tape.add(math.inf, 0.1)
    assert len(tape.losses) == 11


def test_engines_are_closed_whatever_happens() -> None:
    closed: list[str] = []
    close = preamp.Engine.close

    def note(engine: preamp.Engine) -> None:
        closed.append(engine.policy.opt_level)
        close(engine)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preamp.Engine, "close", note)
        run(prepare(config("O0", "O1"), CORPUS), Interrupter("O1", 2))
    assert closed == ["O0", "O1"]


@pytest.mark.parametrize(
    ("level", "hint"),
    [
        ("O9", "begin with the letter O"),
        ("02", "here 'O2' was probably meant"),
        ("o2", "here 'O2' was probably meant"),
        ("", "Pass for example --levels O0,O2"),
        ("bf16", "Pass for bfloat16 'O5'"),
    ],
)
def test_unknown_level_is_refused_before_anything_runs(level: str, hint: str) -> None:
    what = f"Opt level {level!r} is not known"
    with pytest.raises(ValueError, match=re.escape(what)) as caught:
        prepare(config("O0", level), CORPUS)
    assert "Choose from O0, O1, O2, O3, O4, O5." in str(caught.value)
    assert hint in str(caught.value)


def test_learning_rate_rises_to_the_top_and_falls_to_the_floor() -> None:
    settings = config("O0", steps=100)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)])
    rates: list[float] = []
    for step in range(100):
        set_learning_rate(optimizer, step, settings)
        rates.append(optimizer.param_groups[0]["lr"])
    top = settings.optimizer.learning_rate
    assert rates[:5] == pytest.approx([top * part / 5 for part in range(1, 6)])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert rates[-1] == pytest.approx(0.1 * top, rel=0.01)


@pytest.mark.parametrize(("steps", "expected"), [(2, 1), (4, 2), (10, 5), (300, 5)])
def test_first_steps_are_not_timed(steps: int, expected: int) -> None:
    assert warmup_steps(steps) == expected


def test_records_tell_what_the_row_tells() -> None:
    (row,) = run(prepare(config("O2"), CORPUS), Watcher()).levels
    history = History()
    for record in row.records:
        history.add(record)
    (start,), steps, (held,) = (history.of(k) for k in (RunRecord, StepRecord, MemoryRecord))
    assert (start.opt_level, start.policy["loss_scale"]) == ("O2", "dynamic")
    assert [step.losses[0] for step in steps] == list(row.losses)
    assert sum(step.skipped for step in steps) == row.steps_skipped
    assert steps[-1].scales == {0: row.loss_scale}
    assert row.memory is not None
    assert sum(held.categories.values()) == round(row.memory.total * sum(start.parameters.values()))


def test_records_name_the_cause_of_a_skipped_step(monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of = train_module.loss_of
    scales = iter([1.0, 1e36, 1.0, 1.0])
    monkeypatch.setattr(train_module, "loss_of", lambda *args: loss_of(*args) * next(scales))
    (row,) = run(prepare(config("O1", steps=4), CORPUS), Watcher()).levels
    (cause,) = (record for record in row.records if isinstance(record, OverflowRecord))
    assert (cause.step, cause.loss_was_finite, cause.old_scale) == (2, True, 65536.0)
    assert cause.parameters
    skipped = [r.step for r in row.records if isinstance(r, StepRecord) and r.skipped]
    assert skipped == [2]


@pytest.mark.parametrize(("storage", "bytes_each"), [("split", 14), ("compact", 8.3)])
def test_storages_take_fewer_bytes(storage: str, bytes_each: float) -> None:
    model = dataclasses.replace(config("O0").model, width=64, layers=1)
    asked = dataclasses.replace(config("O0", "O5"), storage=storage, model=model)
    plain, split = run(prepare(asked, CORPUS), Watcher()).levels
    assert plain.memory is not None
    assert split.memory is not None
    assert plain.memory.masters == 0
    assert split.memory.total == pytest.approx(bytes_each, abs=0.15)
    assert plain.status == split.status == "finished"


def test_a_place_on_the_host_changes_no_loss() -> None:
    losses = {}
    for place in ("device", "host"):
        asked = dataclasses.replace(config("O5"), storage="split", place=place)
        (row,) = run(prepare(asked, CORPUS), Watcher()).levels
        assert row.status == "finished"
        losses[place] = row.losses
    assert losses["host"] == losses["device"]


def test_an_unknown_place_is_refused() -> None:
    with pytest.raises(ValueError, match="place"):
        dataclasses.replace(config("O5"), place="moon")


@pytest.mark.parametrize("place", ["device", "host"])
def test_released_gradients_change_no_loss_but_for_the_clip(place: str) -> None:
    optimizer = dataclasses.replace(config("O5").optimizer, max_norm=math.inf)
    asked = dataclasses.replace(
        config("O5", "O2"), storage="split", place=place, optimizer=optimizer
    )
    kept, gone = (
        run(prepare(dataclasses.replace(asked, release_gradients=releases), CORPUS), Watcher())
        for releases in (False, True)
    )
    assert [row.losses for row in kept.levels] == [row.losses for row in gone.levels]
    assert [row.status for row in gone.levels] == ["finished", "finished"]
    found = preamp.estimate(
        asked_model(asked), preamp.OPT_LEVELS["O5"].replace(storage=gone.config.kept), "FusedAdam"
    )
    memory = gone.levels[0].memory
    assert memory is not None
    if place == "device":  # on a CPU nothing goes to a host
        assert memory.gradients == found.gradients == 0
        assert memory.masters == found.masters / found.parameters
        assert gone.levels[1].memory == kept.levels[1].memory  # a dynamic scale needs them


def asked_model(asked: DemoConfig) -> Callable[[], GPT]:
    return lambda: prepare(asked, CORPUS).start


def test_several_ranks_release_no_gradients() -> None:
    text = "Got released gradients and 2 ranks. Gradients are released in one process only. Leave"
    with pytest.raises(ValueError, match=re.escape(text)):
        dataclasses.replace(config("O5"), ranks=2, release_gradients=True)
