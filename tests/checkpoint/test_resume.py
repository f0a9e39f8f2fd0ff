# SPDX-License-Identifier: BSD-3-Clause
"""Stop between any two steps, load the file, and go on bitwise as if nothing had happened."""

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
from kit.compare import same

SCALES = ("dynamic", 128.0, 1000.0, None)


@st.composite
def programs(draw: Any) -> tuple[list[Event], int]:
    """Two or three steps, of one or more backwards each, and where to stop: after one of them.

    Delayed backwards are followed by another.
    """
    events: list[Event] = []
    stops = [0]
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
        events += [Step(), Zero(draw(st.booleans()))]
        stops += [len(events) - 1, len(events)]
    return events, draw(st.sampled_from(stops))


def without_gradients(numbers: dict[str, Any]) -> dict[str, Any]:
    """Those that a step has used are not saved."""
    return {key: value for key, value in numbers.items() if key != "gradients"}


def check_resume(folder: Path, events: list[Event], stop: int, **run: Any) -> None:
    random.seed(3)
    path = folder / "run.safetensors"
    whole = Run(**run)
    whole.play(events[:stop])
    before = whole.numbers()
    told = len(whole.causes())
    whole.save(path, asynchronous=stop % 2 == 0).wait()
    assert same(whole.numbers(), before)
    whole.play(events[stop:])
    expected, causes = whole.numbers(), whole.causes()[told:]

    random.seed(4)
    resumed = Run(**{**run, "seed": 1})
    resumed.play([Backward(poison=True), Backward()])  # what is there is replaced
    assert resumed.load(path) == {"seed": 0}
    assert same(without_gradients(resumed.numbers()), without_gradients(before))
    resumed.play(events[stop:])
    assert same(without_gradients(resumed.numbers()), without_gradients(expected))
    assert resumed.causes() == causes
    for one in (whole, resumed):
        preamp.engine_of(one.models[0]).close()


@given(data=st.data())
@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_resume_after_any_step(level: str, tmp_path: Path, data: Any) -> None:
    events, stop = data.draw(programs())
    scale = data.draw(st.sampled_from(SCALES))
    check_resume(
        tmp_path,
        events,
        stop,
        level=level,
        names=(data.draw(st.sampled_from(sorted(BUILDS))),),
        arguments={"num_losses": 2} | ({} if scale is None else {"loss_scale": scale}),
    )


EVERYTHING: list[Event] = [
    Backward(loss_id=1),
    Backward(poison=True),
    Step(),
    Zero(),
    Backward(delay_unscale=True),
    Backward(delay_overflow_check=True),
    Clip(),
    Step(),
    Zero(),
    Backward(),
    Clip(),
    Step(),
]


@pytest.mark.parametrize("optimizer", BUILDS)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_every_level_and_optimizer(level: str, optimizer: str, tmp_path: Path) -> None:
    for stop in (3, 8):
        check_resume(
            tmp_path,
            EVERYTHING,
            stop,
            level=level,
            names=(optimizer,),
            arguments={"num_losses": 2, "loss_scale": "dynamic"},
        )


TWO: list[Event] = [
    Backward(members=(0, 1)),
    Backward(loss_id=1, members=(1,), delay_unscale=True),
    Backward(loss_id=1, members=(1,)),
    Step(0),
    Step(1),
    Zero(optimizer=0),
    Zero(optimizer=1),
    Backward(members=(0, 1), poison=True),
    Step(1),
    Step(0),
    Zero(optimizer=0),
    Zero(optimizer=1),
    Backward(members=(0,)),
    Step(0),
]


@pytest.mark.parametrize("stop", [0, 5, 6, 7, 10, 12])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_two_models_and_optimizers(level: str, stop: int, tmp_path: Path) -> None:
    arguments = {"num_losses": 2, "loss_scale": "dynamic"}
    check_resume(tmp_path, TWO, stop, level=level, names=("FusedAdam", "sgd"), arguments=arguments)


@pytest.mark.parametrize(("level", "optimizer"), [("O0", "FusedSGD"), ("O2", "sgd")])
def test_a_scale_that_rounds_clips_alike(level: str, optimizer: str, tmp_path: Path) -> None:
    """The norm comes from the census where the step before was clipped, else from a pass later."""
    step: list[Event] = [Backward(), Clip(), Step(), Zero()]
    runs = [Run(level, (optimizer,), seed, {"loss_scale": "dynamic"}) for seed in range(2)]
    path = tmp_path / "run.safetensors"
    random.seed(1)
    state = {"loss_scaler0": {"loss_scale": 3.0, "unskipped": 0}}
    preamp.load_state_dict(runs[0].optimizers[0], state)
    runs[0].play(step)
    runs[0].save(path)
    runs[0].play(step * 2)
    runs[1].load(path)
    runs[1].play(step * 2)
    assert same(runs[1].numbers(), runs[0].numbers())


WITHIN: dict[str, tuple[list[Event], str | None]] = {
    "after a block": ([Backward()], "between a backward and"),
    "left scaled": ([Backward(delay_unscale=True)], "between a backward and"),
    "within an accumulation": ([Backward(), Backward()], "between a backward and"),
    "clipped": ([Backward(), Clip()], "between a backward and"),
    "after an overflow": ([Backward(poison=True)], "between a backward and"),
    "after its step": ([Backward(), Step()], None),
    "after a skipped step": ([Backward(poison=True), Step()], None),
    "dropped": ([Backward(), Zero()], None),
    "zeroed": ([Backward(), Zero(set_to_none=False)], None),
    "left scaled and dropped": ([Backward(delay_unscale=True), Zero()], None),
}


@pytest.mark.parametrize("case", WITHIN)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_saving_within_a_step_is_refused(level: str, case: str, tmp_path: Path) -> None:
    events, refused = WITHIN[case]
    path = tmp_path / "run.safetensors"
    run = Run(level, ("FusedAdam",))
    run.play([Backward(), Step(), *events])
    if refused is None:
        run.save(path)
        return
    before = run.numbers()
    text = f"save_checkpoint was called {refused} optimizer.step.* Call it after optimizer.step"
    with pytest.raises(preamp.PreampStateError, match=text):
        run.save(path)
    assert same(run.numbers(), before)
    assert not path.exists()
    for model in run.models:  # by the model, of which the optimizer is not told
        model.zero_grad()
    run.save(path)


def test_loading_drops_gradients(tmp_path: Path) -> None:
    run = Run("O2")
    run.save(tmp_path / "run.safetensors")
    run.play([Backward(poison=True)])
    run.load(tmp_path / "run.safetensors")
    assert {type(grad) for grads in run.numbers()["gradients"] for grad in grads} == {type(None)}
    run.play([Backward(), Step()])
    engine = preamp.engine_of(run.models[0])
    assert (engine.steps_applied, engine.steps_skipped) == (1, 0)


def test_random_states_of_all_libraries(tmp_path: Path) -> None:
    import numpy as np

    run = Run("O1")
    run.save(tmp_path / "run.safetensors")

    def draw() -> tuple[Any, ...]:
        return torch.rand(3).tolist(), random.random(), random.gauss(0, 1), np.random.rand()

    expected = draw()
    run.load(tmp_path / "run.safetensors")
    assert draw() == expected
    run.load(tmp_path / "run.safetensors", rng=False)
    assert draw() != expected
