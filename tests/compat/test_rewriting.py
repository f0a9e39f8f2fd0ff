# SPDX-License-Identifier: BSD-3-Clause
"""Half gradients written to after scale_loss: without effect under Apex's names, with a warning."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import preamp
from cases.tolerances import assert_same
from kit.refusals import refused
from preamp import amp

X = torch.tensor([[1.0, -2.0, 0.5], [0.25, 1.0, -1.0]])
NO_EFFECT = "^The float16 gradient of '0.weight' was changed after scale_loss"


def made() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    return model, torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.5)


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.01)


def clip_values(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)


def replace(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 3


def train(
    model: nn.Module,
    optimizer: Any,
    change: Callable[[nn.Module], None] | None,
    steps: int = 3,
    micro: int = 1,
) -> list[torch.Tensor]:
    for step in range(steps):
        for part in range(micro):
            loss = model(X * (1 + step + part)).square().mean()
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()
            if change is not None:
                change(model)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in amp.master_params(optimizer)]


@pytest.mark.parametrize("change", [clip, clip_values, replace])
@pytest.mark.parametrize("micro", [1, 2])
def test_a_script_that_writes_to_half_gradients_runs_on(
    change: Callable[[nn.Module], None], micro: int
) -> None:
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    wanted = train(model, optimizer, None, micro=micro)
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.warns(UserWarning, match=NO_EFFECT) as caught:
        found = train(model, optimizer, change, micro=micro)
    assert len(caught) == 1
    for ours, exact in zip(found, wanted, strict=True):
        assert_same(ours, exact)


def test_it_goes_on_after_the_steps_that_are_watched() -> None:
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with pytest.warns(UserWarning, match=NO_EFFECT):
        train(model, optimizer, clip, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = train(model, optimizer, clip, 20)
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, None, 1)
    for ours, exact in zip(found, train(model, optimizer, None, 20), strict=True):
        assert_same(ours, exact)


def test_who_begins_late_is_refused() -> None:
    """By then masters take half gradients as they lie, and what was written over is lost."""
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    train(model, optimizer, None, 12)
    with refused("compat", "a changed half gradient", changes=True):
        train(model, optimizer, clip, 1)


def test_zeroing_and_dropping_still_count() -> None:
    model, optimizer = made()
    amp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    before = [param.detach().clone() for param in amp.master_params(optimizer)]
    found = train(model, optimizer, lambda model: model.zero_grad(), 2)
    for ours, exact in zip(found, before, strict=True):
        assert_same(ours, exact)


# -- each sentence of the page on clipping ------------------------------------------------------


def halve(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad.mul_(0.5)


def clip_to_four(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 4.0)


def clip_to_one(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)


def halved(model: nn.Module) -> None:
    for param in model.parameters():
        assert param.grad is not None
        param.grad = param.grad * 0.5


def take_step(
    door: Any,
    arguments: dict[str, Any],
    change: Callable[[nn.Module], object],
    *,
    backwards: int = 1,
    late: bool = False,
) -> float:
    """What one step took off a weight whose gradient is 8, changed after the block."""
    model = nn.Linear(2, 2, bias=False)
    nn.init.constant_(model.weight, 32.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    door.initialize(model, optimizer, verbosity=0, **arguments)

    def step(change: Callable[[nn.Module], object] = lambda _: None) -> None:
        optimizer.zero_grad()
        for _ in range(backwards):
            with door.scale_loss(model.weight.float().sum() * (8 / backwards), optimizer) as scaled:
                scaled.backward()
        change(model)
        optimizer.step()

    try:
        for _ in range(12 if late else 0):
            step()
        optimizer.param_groups[0]["lr"] = 1.0
        step(change)
        return 32.0 - next(iter(amp.master_params(optimizer))).flatten()[0].item()
    finally:
        preamp.engine_of(model).close()


HALF = {"O2": "float16", "O5": "bfloat16"}
DOORS = pytest.mark.parametrize("door", [amp, preamp], ids=["amp", "preamp"])
CHANGES = pytest.mark.parametrize("change", [halve, clip_to_four, halved])
BACKWARDS = pytest.mark.parametrize("backwards", [1, 2])
LATE = pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
PLAIN = pytest.mark.parametrize(
    "arguments",
    [{"opt_level": "O5"}, {"opt_level": "O2", "loss_scale": 1.0}],
    ids=["O5", "O2 without a scale"],
)
SCALED = pytest.mark.parametrize(
    "arguments",
    [{"opt_level": level, "loss_scale": 64.0} for level in ("O2", "O5")],
    ids=["O2", "O5 with a scale"],
)


@DOORS
@CHANGES
@BACKWARDS
@LATE
@pytest.mark.parametrize("level", ["O0", "O1", "O3", "O4"])
@pytest.mark.parametrize("loss_scale", [1.0, 64.0])
def test_without_masters_a_change_counts(
    door: Any, change: Any, level: str, loss_scale: float, backwards: int, late: bool
) -> None:
    arguments = {"opt_level": level, "loss_scale": loss_scale}
    assert take_step(door, arguments, change, backwards=backwards, late=late) == 4.0


@DOORS
@CHANGES
@LATE
@PLAIN
def test_without_a_loss_scale_a_change_counts(
    door: Any, change: Any, arguments: dict[str, Any], late: bool
) -> None:
    assert take_step(door, arguments, change, late=late) == 4.0


@DOORS
@pytest.mark.parametrize("change", [halve, halved, clip_to_one])
@LATE
@PLAIN
def test_without_a_loss_scale_a_change_of_a_part_is_refused(
    door: Any, change: Any, arguments: dict[str, Any], late: bool
) -> None:
    with refused("compat", "a change of a part", changes=True, half=HALF[arguments["opt_level"]]):
        take_step(door, arguments, change, backwards=2, late=late)


@CHANGES
@BACKWARDS
@SCALED
def test_with_a_loss_scale_a_change_has_no_effect_under_apexs_names(
    change: Any, arguments: dict[str, Any], backwards: int
) -> None:
    with pytest.warns(UserWarning, match="as with Apex that has no effect"):
        assert take_step(amp, arguments, change, backwards=backwards) == 8.0


@CHANGES
@BACKWARDS
@SCALED
@pytest.mark.parametrize(
    ("door", "late"), [(amp, True), (preamp, False), (preamp, True)], ids=["amp", "own", "own late"]
)
def test_with_a_loss_scale_a_change_is_refused(
    door: Any, change: Any, arguments: dict[str, Any], backwards: int, late: bool
) -> None:
    with refused(
        "compat", "a change of a scaled gradient", changes=True, half=HALF[arguments["opt_level"]]
    ):
        take_step(door, arguments, change, backwards=backwards, late=late)


@DOORS
@BACKWARDS
@LATE
@pytest.mark.parametrize(
    "arguments", [{"opt_level": "O5"}, {"opt_level": "O2", "loss_scale": 64.0}], ids=["O5", "O2"]
)
def test_zeros_and_none_count_and_asking_for_the_norm_changes_nothing(
    door: Any, arguments: dict[str, Any], backwards: int, late: bool
) -> None:
    def zero(model: nn.Module) -> None:
        model.zero_grad(set_to_none=False)

    def ask(model: nn.Module) -> None:
        preamp.clip_grad_norm_(preamp.engine_of(model).optimizers[0], math.inf)

    for change, taken in ((zero, 0.0), (nn.Module.zero_grad, 0.0), (ask, 8.0)):
        assert take_step(door, arguments, change, backwards=backwards, late=late) == taken


@DOORS
@pytest.mark.parametrize(
    "arguments", [{"opt_level": "O5"}, {"opt_level": "O2", "loss_scale": 64.0}], ids=["O5", "O2"]
)
@BACKWARDS
def test_what_is_to_be_clipped_with_masters(
    door: Any, arguments: dict[str, Any], backwards: int
) -> None:
    """The norm of four gradients of 8 is 16."""

    def masters(model: nn.Module) -> None:
        optimizer = preamp.engine_of(model).optimizers[0]
        nn.utils.clip_grad_norm_(amp.master_params(optimizer), 8.0)

    def ours(model: nn.Module) -> None:
        preamp.clip_grad_norm_(preamp.engine_of(model).optimizers[0], 8.0)

    for clip in (masters, ours):
        taken = take_step(door, arguments, clip, backwards=backwards)
        assert taken == pytest.approx(4.0, rel=1e-6)


def test_preamps_own_engines_refuse() -> None:
    model, optimizer = made()
    preamp.initialize(model, optimizer, opt_level="O2", verbosity=0)
    with refused("compat", "a changed half gradient", changes=True):
        train(model, optimizer, clip, 1)


def test_several_optimizers_warn_once() -> None:
    model, _ = made()
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.25) for part in model]
    amp.initialize(model, optimizers, opt_level="O2", verbosity=0)
    with amp.scale_loss(model(X).square().mean(), optimizers) as scaled:
        scaled.backward()
    clip(model)
    with pytest.warns(UserWarning, match=NO_EFFECT):
        optimizers[0].step()
    optimizers[1].step()  # warnings are errors here
