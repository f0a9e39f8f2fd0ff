# SPDX-License-Identifier: BSD-3-Clause
"""Stop between any two events, load the file, and go on bitwise as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import preamp
from cases.levels import LEVEL_NAMES
from cases.selection import examples
from checkpoint.runs import BUILDS, Backward, Clip, Event, Run, Step, Zero
from engine.harness import same

SCALES = ("dynamic", 128.0, 1000.0, None)


@st.composite
def programs(draw: Any) -> list[Event]:
    """Two or three steps, of one or more backwards each; delayed ones are followed by another."""
    events: list[Event] = []
    for _ in range(draw(st.integers(2, 3))):
        for is_last in draw(st.sampled_from([(True,), (False, True), (False, False, True)])):
            events.append(
                Backward(
                    loss_id=draw(st.integers(0, 1)),
                    delay_unscale=not is_last and draw(st.booleans()),
                    delay_overflow_check=draw(st.booleans()),
                    poison=draw(st.sampled_from([False, False, False, True])),
                )
            )
        events += [Clip()] if draw(st.booleans()) else []
        events += [Step()]
        zero = draw(st.sampled_from([None, True, False]))
        events += [] if zero is None else [Zero(zero)]
    return events


def check_resume(
    folder: Path, events: list[Event], stop: int, *, suffix: str = ".pt", **run: Any
) -> None:
    random.seed(3)
    whole = Run(**run)
    whole.play(events[:stop])
    before = whole.numbers()
    told = len(whole.causes())
    whole.save(folder / f"run{suffix}", asynchronous=stop % 2 == 0).wait()
    assert same(whole.numbers(), before)
    whole.play(events[stop:])
    expected, causes = whole.numbers(), whole.causes()[told:]

    random.seed(4)
    resumed = Run(**{**run, "seed": 1})
    resumed.play([Backward(poison=True), Backward()])  # what is there is replaced
    assert resumed.load(folder / f"run{suffix}") == {"seed": 0}
    assert same(resumed.numbers(), before)
    resumed.play(events[stop:])
    assert same(resumed.numbers(), expected)
    assert resumed.causes() == causes
    for one in (whole, resumed):
        preamp.engine_of(one.models[0]).close()


@given(data=st.data())
@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_resume_anywhere(level: str, tmp_path: Path, data: Any) -> None:
    events = data.draw(programs())
    scale = data.draw(st.sampled_from(SCALES))
    check_resume(
        tmp_path,
        events,
        data.draw(st.integers(0, len(events))),
        level=level,
        names=(data.draw(st.sampled_from(sorted(BUILDS))),),
        arguments={"num_losses": 2} | ({} if scale is None else {"loss_scale": scale}),
    )


EVERYTHING: list[Event] = [
    Backward(loss_id=1),
    Backward(poison=True),
    Step(),
    Backward(delay_unscale=True),
    Backward(delay_overflow_check=True),
    Clip(),
    Step(),
    Zero(),
    Backward(),
]


@pytest.mark.each
@pytest.mark.parametrize("optimizer", BUILDS)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_every_level_and_optimizer(level: str, optimizer: str, tmp_path: Path) -> None:
    for stop in (2, 4, 6):
        check_resume(
            tmp_path,
            EVERYTHING,
            stop,
            suffix=".safetensors",
            level=level,
            names=(optimizer,),
            arguments={"num_losses": 2, "loss_scale": "dynamic"},
        )


TWO: list[Event] = [
    Backward(members=(0, 1)),
    Backward(loss_id=1, members=(1,), delay_unscale=True),
    Step(0),
    Backward(loss_id=1, members=(1,)),
    Step(1),
    Zero(optimizer=0),
    Backward(members=(0, 1), poison=True),
    Step(1),
    Step(0),
    Backward(members=(0,)),
]


@pytest.mark.parametrize("stop", range(len(TWO) + 1))
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_two_models_and_optimizers(level: str, stop: int, tmp_path: Path) -> None:
    arguments = {"num_losses": 2, "loss_scale": "dynamic"}
    check_resume(tmp_path, TWO, stop, level=level, names=("FusedAdam", "sgd"), arguments=arguments)


KNOWN: list[Event] = [
    Backward(members=(0, 1), poison=True),
    Backward(loss_id=1, members=(1,), delay_unscale=True),
    Backward(loss_id=1, members=(1,)),
    Step(1),
]


@pytest.mark.parametrize("stop", [1, 2, 3])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_that_one_loss_scale_knows_of_lowers_no_other(
    level: str, stop: int, tmp_path: Path
) -> None:
    """Gradients left scaled are joined in place by earlier ones, which overflowed."""
    arguments = {"num_losses": 2, "loss_scale": "dynamic"}
    check_resume(
        tmp_path, KNOWN, stop, level=level, names=("FusedAdam", "sgd"), arguments=arguments
    )


def test_the_check_can_fail(tmp_path: Path) -> None:
    """Without the pending gradients the run is another one."""
    whole = Run("O2")
    whole.play([Backward()])
    whole.save(tmp_path / "run.pt")
    resumed = Run("O2", seed=1)
    resumed.load(tmp_path / "run.pt", gradients=False)
    for run in (whole, resumed):
        run.play([Backward(), Step()])
    assert not same(resumed.numbers(), whole.numbers())


def test_random_states_of_all_libraries(tmp_path: Path) -> None:
    import numpy as np

    run = Run("O1")
    run.save(tmp_path / "run.pt")

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand()

    expected = draw()
    run.load(tmp_path / "run.pt")
    assert draw() == expected
    run.load(tmp_path / "run.pt", rng=False)
    assert draw() != expected
