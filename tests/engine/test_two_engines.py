# SPDX-License-Identifier: BSD-3-Clause
"""Two engines in one process: trained by turns, each gives bitwise what it gives alone."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import preamp
from cases.levels import LEVEL_NAMES
from engine.harness import engines_closed as engines_closed
from engine.harness import everything, loss_of, make, same, started, train_plain, train_step
from preamp import amp

STEPS = 4
POISONED = 2  # this step of the first engine overflows
PAIRS = [("O1", "O2"), ("O1", "O0"), ("O1", "O4"), ("O2", "O2"), ("O1", "O1"), ("O5", "O3")]

Run = tuple[Any, Any]


def one_step(run: Run, step: int, *, poison: bool) -> None:
    train_step(*run, step, poison=poison)


def alone(level: str, seed: int, optimizer: str, *, poison: bool) -> dict[str, Any]:
    run = started(level, seed, optimizer, loss_scale="dynamic")
    for step in range(STEPS):
        one_step(run, step, poison=poison and step == POISONED)
    result = everything(*run)
    preamp.engine_of(run[0]).close()
    return result


@pytest.mark.apex("1.1 another call with new objects")
@pytest.mark.parametrize(("first", "second"), [*PAIRS, *((b, a) for a, b in PAIRS[:3])])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_interleaved(first: str, second: str, optimizer: str) -> None:
    expected = (alone(first, 0, optimizer, poison=True), alone(second, 1, optimizer, poison=False))
    one = started(first, 0, optimizer, loss_scale="dynamic")
    two = started(second, 1, optimizer, loss_scale="dynamic")
    for step in range(STEPS):
        one_step(one, step, poison=step == POISONED)
        one_step(two, step, poison=False)
    assert same(everything(*one), expected[0])
    assert same(everything(*two), expected[1])
    assert preamp.engine_of(one[0]).steps_skipped >= 1


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_nested_blocks(first: str, second: str) -> None:
    """One engine's whole backward inside the other's ``with`` block."""
    expected = alone(first, 0, "sgd", poison=False), alone(second, 1, "sgd", poison=False)
    one = started(first, 0, loss_scale="dynamic")
    two = started(second, 1, loss_scale="dynamic")
    for step in range(STEPS):
        for run in (one, two):
            run[1].zero_grad()
        outer, inner = loss_of(one[0], step), loss_of(two[0], step)
        with preamp.scale_loss(outer, one[1]) as scaled:
            with preamp.scale_loss(inner, two[1]) as other:
                other.backward()
            scaled.backward()
        for run in (two, one):
            run[1].step()
    assert same(everything(*one), expected[0])
    assert same(everything(*two), expected[1])


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_plain_training_of_a_half_precision_neighbour(level: str) -> None:
    """Closing one engine halfway leaves the other's course alone."""
    expected = alone("O2", 1, "adam", poison=False)
    one = started(level, 0, "adam", loss_scale="dynamic")
    two = started("O2", 1, "adam", loss_scale="dynamic")
    for step in range(STEPS):
        if step < 2:
            one_step(one, step, poison=False)
        elif step == 2:
            preamp.engine_of(one[0]).close()
        one_step(two, step, poison=False)
    assert same(everything(*two), expected)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_models_that_are_cast_are_left_out_of_another_engines_function_casts(level: str) -> None:
    model, _ = started(level)
    x = torch.randn(6, 4)
    expected = model.eval()(x)
    started("O1", 1)
    assert same(model(x), expected)


@pytest.mark.apex("4.1 how far casts reach", "B 14: casts of the model only")
def test_plain_models_are_not_touched_by_scope_model() -> None:
    reference = make(1)
    for step in range(STEPS):
        train_plain(*reference, step)
    run = started("O1", 0, scope="model")
    plain = make(1)
    for step in range(STEPS):
        one_step(run, step, poison=False)
        train_plain(*plain, step)
    assert same(
        [p.detach() for p in plain[0].parameters()], [p.detach() for p in reference[0].parameters()]
    )


@pytest.mark.apex("1.1 another call with new objects")
def test_the_current_engine_is_the_latest_made_through_amp() -> None:
    one, two = make(), make(1)
    amp.initialize(*one, opt_level="O2", verbosity=0)
    amp.initialize(*two, opt_level="O1", verbosity=0, loss_scale=4.0)
    started("O5", 2)  # preamp's own spelling makes nothing current
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 4.0, "unskipped": 0}}
    assert amp._amp_state.opt_properties.opt_level == "O1"
    with amp.scale_loss(loss_of(one[0], 0), one[1]) as scaled:  # the first still has its own scale
        assert scaled.item() == pytest.approx(2.0**16 * loss_of(one[0], 0).item(), rel=0.2)


def test_two_threads() -> None:
    """Function casts belong to the thread that initialized; the other computes as written."""
    seen: list[torch.dtype] = []
    started("O1")

    def work() -> None:
        seen.append(torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [torch.float32]
    assert torch.mm(torch.ones(2, 2), torch.ones(2, 2)).dtype is torch.float16


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_a_step_is_not_cast_by_another_engine(level: str) -> None:
    """Adafactor multiplies matrices in its step, which O1 would round to half."""

    def train() -> dict[str, Any]:
        model, _ = make(3)
        optimizer = torch.optim.Adafactor(model.parameters(), lr=1e-2)
        run = preamp.initialize(model, optimizer, opt_level=level, verbosity=0, loss_scale=8.0)
        for step in range(STEPS):
            train_step(*run, step, poison=False)
        result = everything(*run)
        preamp.engine_of(run[0]).close()
        return result

    alone = train()
    other = started("O1", 1, "sgd")
    assert same(train(), alone)
    assert preamp.engine_of(other[0]) is not None
