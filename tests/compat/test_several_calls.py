# SPDX-License-Identifier: BSD-3-Clause
"""Several calls of ``amp.initialize``: what the functions without an argument mean then."""

import copy
import gc
import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from kit.compare import same
from kit.loops import loss_of, make
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


def step(model: nn.Module, optimizer: Any, number: int, *, poison: bool = False) -> None:
    optimizer.zero_grad()
    with amp.scale_loss(loss_of(model, number), optimizer) as scaled:
        (scaled * float("inf") if poison else scaled).backward()
    optimizer.step()


def skip(run: Any, count: int) -> None:
    for _ in range(count):
        step(*run, 0, poison=True)


def entry(scale: float, unskipped: int = 0) -> dict[str, float]:
    return {"loss_scale": scale, "unskipped": unskipped}


def scales() -> list[float]:
    return [scaler.loss_scale() for scaler in amp._amp_state.loss_scalers]


# -- a copy beside the model in training --------------------------------------------------------


@ALL_LEVELS
@pytest.mark.parametrize("first", [True, False])
def test_an_evaluation_copy_takes_nothing_over(level: str, first: bool) -> None:
    if first:
        teacher = amp.initialize(Net(), opt_level=level, verbosity=0)
    run = started(level)
    skip(run, 14)
    if not first:
        teacher = amp.initialize(Net(), opt_level=level, verbosity=0)
    assert amp.state_dict() == {"loss_scaler0": entry(4.0)}
    assert amp._amp_state.engine is preamp.engine_of(run[1])
    amp._amp_state.loss_scalers[0]._loss_scale = 128.0
    assert preamp.engine_of(run[1]).loss_scale() == 128.0
    amp.load_state_dict({"loss_scaler0": entry(32.0, 5)})
    assert preamp.engine_of(run[1]).loss_scale() == 32.0
    assert list(amp.master_params()) == list(amp.master_params(run[1]))
    assert preamp.engine_of(teacher) is not amp._amp_state.engine


def test_what_a_copy_is_given_does_not_reach_the_model_in_training(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = started("O2", verbosity=1, min_loss_scale=2.0, max_loss_scale=2.0**20)
    amp.initialize(Net(), opt_level="O0", verbosity=0, min_loss_scale=8.0)
    capsys.readouterr()
    skip(run, 1)
    assert "Gradient overflow." in capsys.readouterr().out
    state = amp._amp_state
    assert (state.min_loss_scale, state.max_loss_scale) == (2.0, 2.0**20)
    assert state.opt_properties.opt_level == "O2"


def test_a_copy_with_amp_off_turns_nothing_off() -> None:
    run = started("O2")
    skip(run, 3)
    amp.initialize(Net(), enabled=False)
    assert amp.state_dict() == {"loss_scaler0": entry(2.0**13)}
    assert not amp._amp_state.is_off
    assert amp._amp_state.opt_properties.enabled
    skip(run, 1)
    assert scales() == [2.0**12]


def test_a_copy_alone_is_what_is_meant() -> None:
    model = amp.initialize(Net(), opt_level="O2", verbosity=0)
    assert amp._amp_state.engine is preamp.engine_of(model)
    assert amp.state_dict() == {"loss_scaler0": entry(2.0**16)}
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


def pair(level: str = "O2", *, losses: int = 1) -> tuple[Any, Any]:
    """A generator and a discriminator, by two calls, with a copy between."""
    generator = started(level, 0)
    _alive.append(amp.initialize(Net(), opt_level="O0", verbosity=0))
    return generator, started(level, 1, num_losses=losses)


@ALL_LEVELS
def test_all_in_training_are_meant_the_latest_first(level: str) -> None:
    generator, discriminator = pair(level, losses=2)
    skip(generator, 2)
    skip(discriminator, 3)
    expected = [entry(2.0**13), entry(2.0**16), entry(2.0**14)]
    assert amp.state_dict() == {f"loss_scaler{i}": state for i, state in enumerate(expected)}
    assert scales() == [2.0**13, 2.0**16, 2.0**14]
    amp._amp_state.loss_scalers[1]._loss_scale = 64.0
    assert preamp.engine_of(discriminator[1]).loss_scale(1) == 64.0
    both = [*amp.master_params(discriminator[1]), *amp.master_params(generator[1])]
    assert list(amp.master_params()) == both
    assert amp._amp_state.engine is preamp.engine_of(discriminator[0])


def test_verbosity_reaches_all(capsys: pytest.CaptureFixture[str]) -> None:
    for run in pair():
        amp._amp_state.verbosity = 1
        skip(run, 1)
        amp._amp_state.verbosity = 0
        skip(run, 1)
    assert capsys.readouterr().out.count("Gradient overflow.") == 2


@ALL_LEVELS
def test_a_resumed_pair_goes_on_bitwise(level: str) -> None:
    runs = pair(level)
    skip(runs[0], 2)
    skip(runs[1], 5)
    for run in runs:
        step(*run, 1)
    file = io.BytesIO()
    content = [(model.state_dict(), optimizer.state_dict()) for model, optimizer in runs]
    torch.save({"runs": content, "amp": amp.state_dict()}, file)
    file.seek(0)
    for run in runs:
        step(*run, 2)
    expected = [copy.deepcopy(thing.state_dict()) for run in runs for thing in run]
    scalers = amp.state_dict()
    for run in runs:
        preamp.engine_of(run[0]).close()

    saved = torch.load(file, weights_only=True)
    resumed = pair(level)
    for (model, optimizer), (weights, state) in zip(resumed, saved["runs"], strict=True):
        model.load_state_dict(weights)
        optimizer.load_state_dict(state)
    amp.load_state_dict(saved["amp"])
    for run in resumed:
        step(*run, 2)
    assert same([thing.state_dict() for run in resumed for thing in run], expected)
    assert amp.state_dict() == scalers


def test_one_calls_file_goes_to_the_latest_call(capsys: pytest.CaptureFixture[str]) -> None:
    """As one that Apex wrote, which had the latest call's alone; or a model of before is kept."""
    pair()
    amp._amp_state.loss_scalers[1]._loss_scale = 16.0
    amp.load_state_dict({"loss_scaler0": entry(8.0)})
    assert scales() == [8.0, 16.0]
    assert capsys.readouterr().out == ""


def test_two_calls_file_in_one_calls_run(capsys: pytest.CaptureFixture[str]) -> None:
    started()
    amp.load_state_dict({"loss_scaler0": entry(8.0), "loss_scaler1": entry(4.0)})
    assert scales() == [8.0]
    assert capsys.readouterr().out == (
        "Warning: state_dict contains 2 entries, while 1 loss_scalers are used\n"
        "Skipping loss_scaler[1], since num_losses was set to 1\n"
    )


def test_the_file_of_one_call_with_two_losses_fits_two_calls() -> None:
    started(num_losses=2)
    amp._amp_state.loss_scalers[1]._loss_scale = 16.0
    state = amp.state_dict()
    preamp.engine_of(amp._amp_state.engine.models[0]).close()
    pair()
    amp.load_state_dict(state)
    assert scales() == [2.0**16, 16.0]


def test_an_unreadable_entry_of_the_second_leaves_the_first(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pair()
    with refused("compat", "an unreadable scaler", entry="{}"):
        amp.load_state_dict({"loss_scaler0": entry(8.0), "loss_scaler1": {}})
    assert scales() == [2.0**16, 2.0**16]
    assert capsys.readouterr().out == ""


@ALL_LEVELS
@pytest.mark.parametrize("index", [0, 1])
def test_a_backward_by_hand_of_the_second(level: str, index: int) -> None:
    """By whichever scaler the script multiplies the loss, that one unscales."""
    pair(level)
    run = amp._amp_state.engine
    model, optimizer = run.models[0], run.optimizers[0]
    amp._amp_state.loss_scalers[0]._loss_scale = 8.0
    amp._amp_state.loss_scalers[1]._loss_scale = 512.0
    scaler = amp._amp_state.loss_scalers[index]
    other, by_block = started(level, 1, loss_scale=64.0)
    for number in range(2):
        optimizer._prepare_amp_backward()
        (loss_of(model, number) * scaler.loss_scale()).backward()
        optimizer._post_amp_backward(scaler)
        assert not scaler.update_scale()
        with amp.scale_loss(loss_of(other, number), by_block) as scaled:
            scaled.backward()
    mine, wanted = map(amp.master_params, (optimizer, by_block))
    for ours, theirs in zip(mine, wanted, strict=True):
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
                amp._amp_state.loss_scalers[number]._loss_scale = 4.0 + turn
            engine = preamp.engine_of(run[1])
            assert [engine.loss_scale(i) for i in range(losses)] == [4.0 + turn] * losses
            skip(run, 1)
            assert amp.state_dict()["loss_scaler0"] == entry((4.0 + turn) / 2)
    finally:
        gc.enable()
    mine = [*amp.master_params(run[1])]
    assert [*amp.master_params()][: len(mine)] == mine
    assert preamp.engine_of(_alive[0][1]).loss_scale() == 2.0  # as it was left


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_two_models_and_losses_tried_in_turn(level: str) -> None:
    """Each try poisons one loss's backward, and expects its scale alone to fall from 4."""
    for loss_id in (0, 1):
        first, second = make(0)[0], make(1)[0]
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.125)
        options: dict[str, Any] = {"loss_scale": "dynamic", "num_losses": 2, "verbosity": 0}
        (first, second), optimizer = amp.initialize(
            [first, second], optimizer, opt_level=level, **options
        )
        _alive.append((first, second, optimizer))
        for scaler in amp._amp_state.loss_scalers[:2]:
            scaler._loss_scale = 4.0
        for number, model in enumerate((first, second)):
            with amp.scale_loss(loss_of(model, 0), optimizer, loss_id=number) as scaled:
                (scaled * float("inf") if number == loss_id else scaled).backward()
        optimizer.step()
        assert scales()[:2] == [2.0 if number == loss_id else 4.0 for number in range(2)]
        assert amp._amp_state.engine is preamp.engine_of(optimizer)


def test_a_file_written_beside_an_earlier_run_is_of_the_latest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs = [started(), started(num_losses=2)]
    amp._amp_state.loss_scalers[1]._loss_scale = 16.0
    state = amp.state_dict()
    for run in runs:
        preamp.engine_of(run[1]).close()
    started(num_losses=2)
    amp.load_state_dict(state)
    assert scales() == [2.0**16, 16.0]
    assert capsys.readouterr().out.endswith(
        "Skipping loss_scaler[2], since num_losses was set to 2\n"
    )


# -- engines that end ---------------------------------------------------------------------------


def test_a_closed_one_is_left_out_and_the_other_stays() -> None:
    generator, discriminator = pair()
    skip(generator, 1)
    preamp.engine_of(discriminator[0]).close()
    assert amp.state_dict() == {"loss_scaler0": entry(2.0**15)}
    assert amp._amp_state.engine is preamp.engine_of(generator[0])
    preamp.engine_of(generator[0]).close()
    assert amp._amp_state.engine is not None  # the copy, which has no optimizer
    assert amp._amp_state.opt_properties.opt_level == "O0"
    assert amp._amp_state.loss_scalers[0].loss_scale() == 1.0
    amp._amp_state.engine.close()
    assert amp._amp_state.engine is None
    assert amp._amp_state.loss_scalers == []
    assert amp.state_dict() == {}


@pytest.mark.parametrize("level", ["O0", "O1", "O4"])
def test_two_optimizers_of_one_model_by_two_calls(level: str) -> None:
    model, body = started(level)
    head = torch.optim.SGD(model.last.parameters(), lr=0.5)
    amp.initialize(model, head, opt_level=level, loss_scale="dynamic", verbosity=0)
    skip((model, body), 1)
    skip((model, head), 2)
    assert amp.state_dict() == {"loss_scaler0": entry(2.0**14), "loss_scaler1": entry(2.0**15)}
    assert len(list(amp.master_params())) == len(list(model.parameters()))  # each of them once


# -- parameters without an optimizer -----------------------------------------------------------


def test_master_params_before_initialize() -> None:
    for prepare in (lambda: None, lambda: amp.initialize(Net(), opt_level="O2", verbosity=0)):
        kept = prepare()
        with refused("compat", "master_params before initialize"):
            amp.master_params()
        del kept


def test_master_params_with_amp_off() -> None:
    model, optimizer = amp.initialize(*make(), enabled=False)
    assert list(amp.master_params()) == list(model.parameters())
    assert list(amp.master_params(optimizer)) == list(model.parameters())


@ALL_LEVELS
def test_both_models_are_clipped_at_once(level: str) -> None:
    runs = pair(level)
    for run in runs:
        with amp.scale_loss(loss_of(run[0], 0), run[1]) as scaled:
            scaled.backward()
    grads = [p.grad.detach().clone().double() for p in amp.master_params()]
    norm = torch.stack([grad.norm() for grad in grads]).norm().item()
    found = torch.nn.utils.clip_grad_norm_(amp.master_params(), norm / 2)
    assert found.item() == pytest.approx(norm, rel=1e-2)
    for grad, clipped in zip(grads, amp.master_params(), strict=True):
        torch.testing.assert_close(clipped.grad.double(), grad / 2, rtol=1e-2, atol=1e-4)
