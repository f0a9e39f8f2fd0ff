# SPDX-License-Identifier: BSD-3-Clause
"""Whatever a script calls in whatever order, it gets what plain torch computes in float64."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from cases.levels import LEVEL_NAMES
from cases.selection import examples
from engine.programs import (
    NAMES,
    OPTIMIZERS,
    Again,
    Backward,
    Call,
    Checkpoint,
    Clip,
    Freeze,
    Look,
    Read,
    Step,
    World,
    Write,
    WriteMasters,
    Zero,
    run,
)

indices, booleans, which = st.integers(0, 5), st.booleans(), st.integers(0, 1)
names = st.sampled_from(NAMES)
sometimes, rarely = (st.sampled_from([False] * n + [True]) for n in (2, 6))
parts = st.sampled_from(["a", "b", "q", "n", "ab", "aqn", "abqn", "abqn"])


def weighted(*rows: tuple[int, st.SearchStrategy[Call]]) -> st.SearchStrategy[Call]:
    """One of the calls, each as often as it weighs; `one_of` would count repeated ones once."""
    table = [index for index, (weight, _) in enumerate(rows) for _ in range(weight)]
    return st.sampled_from(table).flatmap(lambda index: rows[index][1])


backwards = st.builds(
    Backward,
    parts,
    indices,
    loss_id=sometimes.map(int),
    delay=sometimes,
    both=sometimes,
    poison=rarely,
    fails=rarely,
    outside=rarely,
    checks_late=rarely,
    zeroes=rarely,
)
zeros = st.builds(Zero, st.sampled_from([0, 1, "model"]), booleans)
clips = st.builds(
    Clip,
    which,
    st.sampled_from([2.0**-12, 2.0**-6, 2.0**6, math.inf]),
    st.sampled_from(["preamp", "masters", "model", "model"]),
)
among_backwards = weighted(
    (2, zeros),
    (3, st.builds(Zero, names, booleans)),
    (3, clips),
    (2, st.builds(Read, names)),
    (1, st.builds(Write, names, st.sampled_from(["fill_", "mul_", "data ="]))),
    (1, st.builds(WriteMasters, which, st.sampled_from(["mul_", "copy_", "data ="]))),
    (1, st.builds(Freeze, names, booleans)),
    (1, st.builds(Look, st.sampled_from(["forward", "deepcopy", "state_dict", "exact_weights"]))),
    (1, st.builds(Checkpoint, st.sampled_from(["save", "load"]))),
)
between_steps = weighted(
    (2, st.builds(Write, names, st.sampled_from(["fill_", "mul_", "data =", "data.fill_"]))),
    (2, st.builds(WriteMasters, which, st.sampled_from(["mul_", "copy_", "data ="]))),
    (1, st.builds(Freeze, names, booleans)),
    (1, st.builds(Look, st.sampled_from(["forward", "deepcopy", "state_dict", "exact_weights"]))),
    (2, st.builds(Checkpoint, st.sampled_from(["save", "load", "restart"]))),
    (1, st.builds(Again, st.sampled_from(LEVEL_NAMES))),
)
Calls = st.SearchStrategy[list[Call]]


def joined(*pieces: Calls) -> Calls:
    return st.tuples(*pieces).map(lambda found: [call for piece in found for call in piece])


def up_to(count: int, calls: st.SearchStrategy[Call]) -> Calls:
    return st.lists(calls, max_size=count)


accumulations = st.lists(
    joined(backwards.map(lambda call: [call]), up_to(2, among_backwards)), min_size=1, max_size=3
).map(lambda found: [call for piece in found for call in piece])
updates: Calls = st.sampled_from(
    [[], [Step(0)], [Step(1)], [Step(0), Step(1)], [Step(0), Step(1)], [Step(0, 3)], [Step(1, 2)]]
)
endings: Calls = st.sampled_from(
    [
        [],
        [Zero("model", True)],
        [Zero("model", False)],
        [Zero(0, False)],
        [Zero(0, True), Zero(1, True)],
        [Zero(0, True), Zero(1, True)],
    ]
)
iterations = joined(up_to(1, between_steps), accumulations, updates, endings)
programs = st.lists(iterations, min_size=1, max_size=5).map(
    lambda found: [call for iteration in found for call in iteration]
)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@settings(
    max_examples=examples(340),
    phases=[Phase.generate, Phase.shrink],
    print_blob=False,
    report_multiple_bugs=False,
)
@given(data=st.data())
def test_programs_do_what_plain_torch_does(level: str, data: st.DataObject) -> None:
    # Where the optimizer's arithmetic is float16 its formula counts, and so does each rounding.
    optimizer = data.draw(st.sampled_from(["SGD"] if level == "O3" else list(OPTIMIZERS)))
    loss_scale: Any = data.draw(st.sampled_from([None, 1.0, 128.0, "dynamic", "dynamic"]))
    frozen = data.draw(st.sampled_from([(), (), ("b.weight",), ("a.bias", "q")]))
    program: Sequence[Call] = data.draw(programs)
    with warnings.catch_warnings():
        # A program may train at a dynamic scale without any block, of which there is a warning.
        warnings.filterwarnings("ignore", message=".*scale_loss", category=UserWarning)
        run(program, level, optimizer, loss_scale, frozen=frozen)


def _later_batch(self: World, parts: str, index: int, *, poison: bool = False) -> None:
    _THEIRS(self, parts, index + 1, poison=poison)


def _overflow_applied(self: World, parts: str, index: int, *, poison: bool = False) -> None:
    del poison
    _THEIRS(self, parts, index)


_THEIRS = World.theirs
PLANTED: dict[str, tuple[str, Any]] = {
    "another batch": ("theirs", _later_batch),
    "an overflow that nobody saw": ("theirs", _overflow_applied),
    "a step not taken": ("plain_step", lambda self, optimizer: None),
    "gradients of steps before": ("end_step", lambda self, optimizer: None),
}


@pytest.mark.parametrize("planted", PLANTED)
def test_what_differs_is_found(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a fault on one side, a program of the calls that matter fails and says what it did."""
    name, method = PLANTED[planted]
    program = [
        Backward("abqn", 1),
        Step(0),
        Backward("aq", 4),
        Step(0),
        Backward("abqn", 2, poison=True, delay=True),
        Backward("abqn", 3),
        Step(0),
    ]
    run(program, "O2")
    monkeypatch.setattr(World, name, method)
    with pytest.raises(AssertionError, match=r"(?s)^initialize.*opt0\.step\(\).*=> "):
        run(program, "O2")
