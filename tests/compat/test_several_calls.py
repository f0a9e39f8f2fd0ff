# SPDX-License-Identifier: BSD-3-Clause
"""Several calls of ``amp.initialize``: what the functions without an argument mean then."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import preamp
from cases.levels import LEVEL_NAMES
from kit.loops import loss_of, make, train_step
from kit.refusals import refused
from kit.run import Net
from preamp import amp

ALL_LEVELS = pytest.mark.parametrize("level", LEVEL_NAMES)


_alive: list[Any] = []


@pytest.fixture(autouse=True)
def runs_live_on() -> Iterator[None]:
    """What a test has started lives until its end, as a script's models do."""
    yield
    _alive.clear()


def started(level: str = "O2", seed: int = 0, **arguments: Any) -> Any:
    arguments = {"loss_scale": "dynamic", "verbosity": 0, **arguments}
    _alive.append(amp.initialize(*make(seed), opt_level=level, **arguments))
    return _alive[-1]


def copied(level: str = "O0", **arguments: Any) -> Any:
    """A model without an optimizer, as for evaluation."""
    _alive.append(amp.initialize(Net(), opt_level=level, verbosity=0, **arguments))
    return _alive[-1]


def pair(level: str = "O2", *, losses: int = 1) -> tuple[Any, Any]:
    """A generator and a discriminator, by two calls, with a copy between."""
    generator = started(level, 0)
    copied()
    return generator, started(level, 1, num_losses=losses)


def skip(run: Any, count: int) -> None:
    for _ in range(count):
        train_step(*run, 0, poison=True)


def entries(*scales: float) -> dict[str, Any]:
    return {
        f"loss_scaler{number}": {"loss_scale": scale, "unskipped": 0}
        for number, scale in enumerate(scales)
    }


def scales() -> list[float]:
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


def write(number: int, scale: float) -> None:
    amp._amp_state.loss_scalers[number]._loss_scale = scale


def engine_of(run: Any) -> preamp.Engine:
    return preamp.engine_of(run[0] if isinstance(run, tuple) else run)


# -- a copy beside the model in training --------------------------------------------------------


@ALL_LEVELS
@pytest.mark.parametrize("first", [True, False])
def test_an_evaluation_copy_takes_nothing_over(level: str, first: bool) -> None:
    teacher = copied(level) if first else None
    run = started(level)
    skip(run, 14)
    teacher = teacher or copied(level)
    assert amp.state_dict() == entries(4.0)
    assert amp._amp_state.engine is engine_of(run)
    write(0, 128.0)
    assert engine_of(run).loss_scale() == 128.0
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 5}})
    assert engine_of(run).loss_scale() == 32.0
    assert list(amp.master_params()) == list(amp.master_params(run[1]))
    assert engine_of(teacher) is not amp._amp_state.engine


@pytest.mark.parametrize("options", [{"min_loss_scale": 8.0}, {"enabled": False}], ids=str)
def test_what_a_copy_is_given_does_not_reach_the_model_in_training(
    options: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = started("O2", verbosity=1, min_loss_scale=2.0, max_loss_scale=2.0**20)
    copied(**options)
    capsys.readouterr()
    before = scales()
    skip(run, 1)
    assert scales() == [before[0] / 2]
    assert "Gradient overflow." in capsys.readouterr().out
    state = amp._amp_state
    assert not state.is_off
    assert (state.min_loss_scale, state.max_loss_scale) == (2.0, 2.0**20)
    assert (state.opt_properties.opt_level, state.opt_properties.enabled) == ("O2", True)


def test_a_copy_alone_is_what_is_meant() -> None:
    model = amp.initialize(Net(), opt_level="O2", verbosity=0)
    assert amp._amp_state.engine is preamp.engine_of(model)
    assert amp.state_dict() == entries(2.0**16)
    later = amp.initialize(Net(), opt_level="O0", verbosity=0)
    assert amp._amp_state.engine is preamp.engine_of(later)
    off = amp.initialize(Net(), enabled=False)
    assert amp._amp_state.is_off
    assert amp.state_dict() == {}
    del off
    gc.collect()
    assert amp._amp_state.is_off
    assert amp._amp_state.opt_properties.enabled is False


# -- two models in training ---------------------------------------------------------------------


@ALL_LEVELS
def test_all_in_training_are_meant_the_latest_first(level: str) -> None:
    generator, discriminator = pair(level, losses=2)
    skip(generator, 2)
    skip(discriminator, 3)
    assert amp.state_dict() == entries(2.0**13, 2.0**16, 2.0**14)
    assert scales() == [2.0**13, 2.0**16, 2.0**14]
    write(1, 64.0)
    assert engine_of(discriminator).loss_scale(1) == 64.0
    both = [*amp.master_params(discriminator[1]), *amp.master_params(generator[1])]
    assert list(amp.master_params()) == both
    assert amp._amp_state.engine is engine_of(discriminator)


def test_verbosity_reaches_all(capsys: pytest.CaptureFixture[str]) -> None:
    for run in pair():
        for verbosity in (1, 0):
            amp._amp_state.verbosity = verbosity
            skip(run, 1)
    assert capsys.readouterr().out.count("Gradient overflow.") == 2


TOLD = "Warning: state_dict contains {} entries, while {} loss_scalers are used\n"
SKIPPED = "Skipping loss_scaler[{0}], since num_losses was set to {0}\n"
FILES: dict[str, tuple[Any, dict[str, Any], list[float], str]] = {
    # what is started, what is loaded, the scales then, and what is told
    "one call's goes to the latest call": (pair, entries(8.0), [8.0, 16.0], ""),
    "two calls' in one call's run": (
        started,
        entries(8.0, 4.0),
        [8.0],
        TOLD.format(2, 1) + SKIPPED.format(1),
    ),
    "one call's with two losses fits two calls": (pair, entries(8.0, 4.0), [8.0, 4.0], ""),
    "of one loss in a run of two": (
        lambda: started(num_losses=2),
        entries(8.0),
        [8.0, 16.0],
        TOLD.format(1, 2),
    ),
    "of three losses in a run of two": (
        lambda: started(num_losses=2),
        entries(8.0, 4.0, 2.0),
        [8.0, 4.0],
        TOLD.format(3, 2) + SKIPPED.format(2),
    ),
    "in another order": (
        lambda: started(num_losses=2),
        dict(reversed(entries(8.0, 4.0).items())),
        [8.0, 4.0],
        "",
    ),
    "of another static scale": (lambda: started(loss_scale=128.0), entries(2.0), [128.0], ""),
}


@pytest.mark.parametrize("name", FILES)
def test_a25_a_file_of_scales(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    start, state, wanted, told = FILES[name]
    start()
    if len(scales()) > 1:
        write(1, 16.0)
    capsys.readouterr()
    amp.load_state_dict(state)
    assert scales() == wanted
    assert capsys.readouterr().out == told


@pytest.mark.parametrize("start", [pair, lambda: started(num_losses=2)], ids=["calls", "losses"])
@pytest.mark.parametrize(
    "entry", [None, 5, {}, {"loss_scale": 4.0}, {"loss_scale": "x", "unskipped": 0}], ids=str
)
def test_a25_an_unreadable_entry_leaves_all(
    start: Any, entry: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    start()
    capsys.readouterr()
    with refused("compat", "an unreadable scaler", entry=repr(entry)):
        amp.load_state_dict({**entries(8.0), "loss_scaler1": entry})
    assert amp.state_dict() == entries(2.0**16, 2.0**16)
    assert capsys.readouterr().out == ""


@ALL_LEVELS
@pytest.mark.parametrize("index", [0, 1])
def test_a_backward_by_hand_of_the_second(level: str, index: int) -> None:
    """By whichever scaler the script multiplies the loss, that one unscales."""
    pair(level)
    run = amp._amp_state.engine
    model, optimizer = run.models[0], run.optimizers[0]
    write(0, 8.0)
    write(1, 512.0)
    scaler = amp._amp_state.loss_scalers[index]
    other, by_block = started(level, 1, loss_scale=64.0)
    for number in range(2):
        optimizer._prepare_amp_backward()
        (loss_of(model, number) * scaler.loss_scale()).backward()
        optimizer._post_amp_backward(scaler)
        assert not scaler.update_scale()
        with amp.scale_loss(loss_of(other, number), by_block) as scaled:
            scaled.backward()
    for ours, theirs in zip(amp.master_params(optimizer), amp.master_params(by_block), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0.02, atol=1e-3)


# -- what an earlier run has left alive ---------------------------------------------------------


@ALL_LEVELS
@pytest.mark.parametrize("losses", [1, 2])
@pytest.mark.parametrize("collects", [True, False])
def test_scales_are_written_while_an_earlier_run_is_alive(
    level: str, losses: int, collects: bool
) -> None:
    """As a script that tries settings in turn, and keeps the variables of the one before."""
    gc.disable()
    try:
        for turn in range(3):
            run = started(level, turn, num_losses=losses)
            if collects:
                gc.collect()
            for number in range(losses):
                write(number, 4.0 + turn)
            found = [engine_of(run).loss_scale(i) for i in range(losses)]
            assert found == [4.0 + turn] * losses
            skip(run, 1)
            assert amp.state_dict()["loss_scaler0"]["loss_scale"] == (4.0 + turn) / 2
    finally:
        gc.enable()
    mine = [*amp.master_params(run[1])]
    assert [*amp.master_params()][: len(mine)] == mine
    assert engine_of(_alive[0]).loss_scale() == 2.0  # as it was left


# -- engines that end ---------------------------------------------------------------------------


def test_a_closed_one_is_left_out_and_the_other_stays() -> None:
    generator, discriminator = pair()
    skip(generator, 1)
    engine_of(discriminator).close()
    assert amp.state_dict() == entries(2.0**15)
    assert amp._amp_state.engine is engine_of(generator)
    engine_of(generator).close()
    assert amp._amp_state.engine is not None  # the copy, which has no optimizer
    assert amp._amp_state.opt_properties.opt_level == "O0"
    assert scales() == [1.0]
    amp._amp_state.engine.close()
    assert amp._amp_state.engine is None
    assert scales() == []
    assert amp.state_dict() == {}


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_two_optimizers_of_one_model_by_two_calls(level: str) -> None:
    model, body = started(level)
    head = torch.optim.SGD(model.last.parameters(), lr=0.5)
    amp.initialize(model, head, opt_level=level, loss_scale="dynamic", verbosity=0)
    skip((model, body), 1)
    skip((model, head), 2)
    assert amp.state_dict() == entries(2.0**14, 2.0**15)
    assert len(list(amp.master_params())) == len(list(model.parameters()))  # each of them once


# -- parameters without an optimizer -----------------------------------------------------------


@pytest.mark.parametrize("prepare", [lambda: None, copied], ids=["nothing", "a copy"])
def test_master_params_before_initialize(prepare: Any) -> None:
    prepare()
    with refused("compat", "master_params before initialize"):
        amp.master_params()


def test_master_params_with_amp_off() -> None:
    model, optimizer = amp.initialize(*make(), enabled=False)
    assert list(amp.master_params()) == list(model.parameters())
    assert list(amp.master_params(optimizer)) == list(model.parameters())
