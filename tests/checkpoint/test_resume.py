# SPDX-License-Identifier: BSD-3-Clause
"""Stop between any two steps, load the file, and go on bitwise as if nothing had happened."""

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
from kit.compare import same
from kit.refusals import refused
from kit.saved import BUILDS, SavedRun

SCALES = ("dynamic", 128.0, 1000.0, None)


@st.composite
def programs(draw: Any) -> tuple[list[str], int]:
    """Two or three steps, of one or more backwards each, and where to stop: after one of them.

    Delayed backwards are followed by another.
    """
    acts: list[str] = []
    stops = [0]
    for _ in range(draw(st.integers(2, 3))):
        for is_last in draw(st.sampled_from([(True,), (False, True), (False, False, True)])):
            words = draw(st.sampled_from(["", "", "", " inf"])) + draw(
                st.sampled_from(["", " late"])
            )
            words += "" if is_last else draw(st.sampled_from(["", " delay"]))
            acts.append(f"random_backward {draw(st.integers(0, 1))}{words}")
        acts += ["clip_first"] if draw(st.booleans()) else []
        acts += ["scheduled_step", f"zero {draw(st.sampled_from(['none', 'filled']))}"]
        stops += [len(acts) - 1, len(acts)]
    return acts, draw(st.sampled_from(stops))


def without_gradients(numbers: dict[str, Any]) -> dict[str, Any]:
    """Those that a step has used are not saved."""
    return {key: value for key, value in numbers.items() if key != "gradients"}


def check_resume(
    folder: Path, program: str | list[str], stop: int, level: str, *names: str, **options: Any
) -> None:
    """Save after ``stop`` acts of a program, and go on from there in another run."""
    acts = program.split("; ") if isinstance(program, str) else program
    before, after = "; ".join(acts[:stop]), "; ".join(acts[stop:])
    random.seed(3)
    path = folder / "run.safetensors"
    whole = SavedRun(level, *names, **options).play(before)
    saved = whole.numbers()
    told = len(whole.causes())
    whole.save(path, asynchronous=stop % 2 == 0).wait()
    assert same(whole.numbers(), saved)
    whole.play(after)
    expected, causes = whole.numbers(), whole.causes()[told:]

    random.seed(4)
    resumed = SavedRun(level, *names, seed=1, **options)
    resumed.play("random_backward 0 inf; random_backward")  # what is there is replaced
    assert resumed.load(path) == {"seed": 0}
    assert not any(g is not None for grads in resumed.numbers()["gradients"] for g in grads)
    assert same(without_gradients(resumed.numbers()), without_gradients(saved))
    resumed.play(after)
    assert same(without_gradients(resumed.numbers()), without_gradients(expected))
    assert resumed.causes() == causes
    for one in (whole, resumed):
        one.close()


@given(data=st.data())
@settings(max_examples=examples(4, quick=2), suppress_health_check=list(HealthCheck))
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("optimizer", BUILDS)
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_resume_after_any_step(level: str, optimizer: str, tmp_path: Path, data: Any) -> None:
    acts, stop = data.draw(programs())
    scale = data.draw(st.sampled_from(SCALES))
    options = {} if scale is None else {"loss_scale": scale}
    check_resume(tmp_path, acts, stop, level, optimizer, num_losses=2, **options)


TWO = (
    "random_backward; random_backward 1 second delay; random_backward 1 second; "
    "scheduled_step 0; scheduled_step 1; zero; "
    "random_backward 0 inf; scheduled_step 1; scheduled_step 0; zero; "
    "random_backward 0 first; scheduled_step 0"
)


@pytest.mark.parametrize("stop", [0, 5, 6, 9, 10])
@pytest.mark.parametrize("level", ["O1", "O2"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_two_models_and_optimizers(level: str, stop: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"num_losses": 2, "loss_scale": "dynamic"}
    check_resume(tmp_path, TWO, stop, level, "FusedAdam", "SGD", **options)


@pytest.mark.parametrize(("level", "optimizer"), [("O0", "FusedSGD"), ("O2", "SGD")])
def test_a_scale_that_rounds_clips_alike(level: str, optimizer: str, tmp_path: Path) -> None:
    """The norm comes from the census where the step before was clipped, else from a pass later."""
    step = "random_backward; clip_first; scheduled_step; zero; "
    runs = [SavedRun(level, optimizer, seed=seed, loss_scale="dynamic") for seed in range(2)]
    path = tmp_path / "run.safetensors"
    random.seed(1)
    state = {"loss_scaler0": {"loss_scale": 3.0, "unskipped": 0}}
    preamp.engine_of(runs[0].optimizer).load_state_dict(state)
    runs[0].play(step).save(path)
    runs[0].play(2 * step)
    runs[1].load(path)
    runs[1].play(2 * step)
    assert same(runs[1].numbers(), runs[0].numbers())


WITHIN = {
    "after a block": "random_backward",
    "left scaled": "random_backward 0 delay",
    "within an accumulation": "random_backward; random_backward",
    "clipped": "random_backward; clip_first",
    "after an overflow": "random_backward 0 inf",
}


@pytest.mark.parametrize("case", WITHIN)
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_saving_within_a_step_is_refused(level: str, case: str, tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    run = SavedRun(level, "FusedAdam").play("random_backward; scheduled_step", WITHIN[case])
    before = run.numbers()
    with refused("checkpoint", "within a step", *run.models, *run.optimizers):
        run.save(path)
    assert same(run.numbers(), before)
    assert not path.exists()
    for model in run.models:  # by the model, of which the optimizer is not told
        model.zero_grad()
    run.save(path)


def test_random_states_of_all_libraries(tmp_path: Path) -> None:
    import numpy as np

    run = SavedRun("O1")
    np.random.standard_normal(3)  # one is kept for the next call
    run.save(tmp_path / "run.safetensors")

    def draw() -> tuple[Any, ...]:
        python = random.random(), random.gauss(0, 1)
        return torch.rand(3).tolist(), *python, np.random.standard_normal(3).tolist()

    expected = draw()
    run.load(tmp_path / "run.safetensors")
    assert draw() == expected
    run.load(tmp_path / "run.safetensors", rng=False)
    assert draw() != expected
