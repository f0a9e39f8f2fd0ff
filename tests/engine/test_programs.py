# SPDX-License-Identifier: BSD-3-Clause
"""Whatever a script calls in whatever order, it gets what plain torch computes in float64."""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import pytest
import torch

import preamp
from cases.levels import EXACT, LEVEL_NAMES, WITH_MASTERS
from engine.programs import (
    NAMES,
    ON_HOST,
    OPTIMIZERS,
    STORAGES,
    Add,
    Again,
    Backward,
    Call,
    Checkpoint,
    Clip,
    Freeze,
    Halve,
    Iteration,
    Look,
    Pair,
    Read,
    Step,
    World,
    Write,
    WriteMasters,
    Zero,
    loss_of,
    run,
    values_of,
)

T = TypeVar("T")


@dataclass(frozen=True)
class Case:
    """A program, and what it runs on."""

    program: list[Call]
    level: str
    optimizer: str
    loss_scale: Any
    frozen: tuple[str, ...]
    storage: str = "full"

    def run(self, **places: Any) -> World:
        options: Any = {"frozen": self.frozen, "storage": self.storage, **places}
        return run(self.program, self.level, self.optimizer, self.loss_scale, **options)


class Dice:
    """Draws programs; the same of the same seed on every machine.

    hypothesis takes part of its values from the sources that happen to be loaded.
    """

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)

    def one(self, values: Sequence[T], weights: Sequence[int] | None = None) -> T:
        return self._random.choices(values, weights)[0]

    def happens(self, *, rarely: bool = False) -> bool:
        return self._random.random() < (1 / 7 if rarely else 1 / 3)

    def number(self, least: int, most: int) -> int:
        return self._random.randint(least, most)

    def case(self, level: str, storage: str = "full") -> Case:
        keeps = STORAGES[storage].moments != "float32" or storage in ON_HOST
        optimizers = [kind for kind in OPTIMIZERS if "Fused" in kind or not keeps]
        # Where the optimizer's arithmetic is float16 its formula counts, and so does each rounding.
        optimizer = self.one(["SGD"] if level == "O3" else optimizers)
        loss_scale = self.one([None, 1.0, 128.0, "dynamic"], [1, 1, 1, 2])
        frozen: tuple[str, ...] = self.one([(), ("b.weight",), ("a.bias", "q")], [2, 1, 1])
        program = [call for _ in range(self.number(1, 5)) for call in self.iteration()]
        return Case(program, level, optimizer, loss_scale, frozen, storage)

    def iteration(self) -> Iterator[Call]:
        if self.happens():
            yield self.between_steps()
        if self.happens(rarely=True):
            yield self.whole_iteration()
            return
        for _ in range(self.number(1, 3)):
            yield self.backward()
            for _ in range(self.number(0, 2)):
                yield self.among_backwards()
        yield from self.one(
            [[], [Step(0)], [Step(1)], [Step(0), Step(1)], [Step(0, 3)], [Step(1, 2)]]
        )
        yield from self.one(
            [
                [],
                [Zero("model", to_none=True)],
                [Zero("model", to_none=False)],
                [Zero(0, to_none=False)],
                [Zero(0, to_none=True), Zero(1, to_none=True)],
            ]
        )

    def backward(self) -> Call:
        return Backward(
            self.one(["a", "b", "q", "n", "ab", "aqn", "abqnc"], [1, 1, 1, 1, 1, 1, 2]),
            self.number(0, 5),
            loss_id=int(self.happens()),
            delay=self.happens(),
            both=self.happens(),
            **{name: self.happens(rarely=True) for name in RARE},
        )

    def whole_iteration(self) -> Call:
        return Iteration(
            self.one(["a", "bc", "aqn", "abqnc"]),
            self.number(0, 5),
            loss_id=int(self.happens()),
            max_norm=self.one([None, 2.0**-12, 2.0**-6, 2.0**6, math.inf]),
            by=self.one(["preamp", "torch", "preamp alone"]),
            poison=self.happens(rarely=True),
        )

    def among_backwards(self) -> Call:
        whole, to_none = self.one([0, 1, "model"]), self.one([True, False])
        maximum = self.one([2.0**-12, 2.0**-6, 2.0**6, math.inf])
        makers: list[tuple[int, Callable[[], Call]]] = [
            (2, lambda: Zero(whole, to_none)),
            (3, lambda: Zero(self.one(NAMES), to_none)),
            (
                3,
                lambda: Clip(
                    self.one([0, 1]), maximum, self.one(["preamp", "masters", "model"], [1, 1, 2])
                ),
            ),
            (2, lambda: Read(self.one(NAMES))),
            (1, lambda: Write(self.one(NAMES), self.one(["fill_", "mul_", "data =", "exact"]))),
            (1, self.write_masters),
            (1, lambda: Halve(self.one([0, 1]))),
            (1, Add),
            (1, self.freeze),
            (1, self.look),
            (1, lambda: Checkpoint(self.one(["save", "load"]))),
        ]
        return self.one([make for _, make in makers], [weight for weight, _ in makers])()

    def between_steps(self) -> Call:
        makers: list[tuple[int, Callable[[], Call]]] = [
            (
                2,
                lambda: Write(
                    self.one(NAMES), self.one(["fill_", "mul_", "data =", "data.fill_", "exact"])
                ),
            ),
            (2, self.write_masters),
            (1, self.freeze),
            (1, self.look),
            (2, lambda: Checkpoint(self.one(["save", "load", "restart"]))),
            (1, lambda: Again(self.one(LEVEL_NAMES), splits=self.happens())),
            (1, lambda: Halve(self.one([0, 1]))),
            (1, Add),
            (1, lambda: Pair(self.number(0, 5))),
        ]
        return self.one([make for _, make in makers], [weight for weight, _ in makers])()

    def write_masters(self) -> Call:
        return WriteMasters(self.one([0, 1]), self.one(["mul_", "copy_", "data ="]))

    def freeze(self) -> Call:
        return Freeze(self.one(NAMES), self.one([True, False]))

    def look(self) -> Call:
        return Look(self.one(["forward", "deepcopy", "state_dict", "exact_weights"]))


RARE = ("poison", "fails", "outside", "checks_late", "zeroes")


def try_all(cases: Iterable[Case]) -> None:
    """Run each; of the first one that fails the smallest part that does is told."""
    for case in cases:
        if failure(case):
            less = smallest(case)
            error = failure(less)
            raise AssertionError(f"{error}\n{less}") from error


def failure(case: Case) -> Exception | None:
    try:
        case.run()
    except Exception as error:
        return error
    return None


def simpler(case: Case) -> Iterator[Case]:
    """Cases with less in them, the boldest first."""
    program = case.program
    size = len(program)
    while size:
        for start in range(0, len(program), size):
            yield replace(case, program=program[:start] + program[start + size :])
        size //= 2
    for at, call in enumerate(program):
        for option in fields(call):
            if option.default is False and getattr(call, option.name):
                less = [*program[:at], replace(call, **{option.name: False}), *program[at + 1 :]]
                yield replace(case, program=less)


def smallest(case: Case) -> Case:
    """A case that fails and of which nothing can be left out."""
    for less in simpler(case):
        if failure(less):
            return smallest(less)
    return case


PARTS = [0, *(pytest.param(part, marks=pytest.mark.full) for part in range(1, 5))]


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.filterwarnings("ignore:.*scale_loss:UserWarning")  # a dynamic scale without a block
def test_programs_do_what_plain_torch_does(
    level: str, part: int, pytestconfig: pytest.Config
) -> None:
    """Other programs are tried with ``--hypothesis-seed``."""
    seed = pytestconfig.getoption("--hypothesis-seed")
    try_all(Dice(f"{seed} {level} {part} {number}").case(level) for number in range(43))


@pytest.mark.parametrize(
    ("level", "storage"),
    [
        *itertools.product(WITH_MASTERS, ["split"]),
        *itertools.product(EXACT, ["compact", "bfloat16"]),
    ],
)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.filterwarnings("ignore:.*scale_loss:UserWarning")
@pytest.mark.filterwarnings("ignore:.*was written to between two steps:UserWarning")
def test_programs_do_so_in_every_storage(
    level: str, storage: str, part: int, pytestconfig: pytest.Config
) -> None:
    seed = pytestconfig.getoption("--hypothesis-seed")
    count = (15 if storage == "split" else 8) if part == 0 else 43
    try_all(
        Dice(f"{seed} {level} {part} {number} {storage}").case(level, storage)
        for number in range(count)
    )


KEPT = [*itertools.product(EXACT, ["full"]), *itertools.product(WITH_MASTERS, ["split", "compact"])]


@pytest.mark.parametrize(("level", "storage"), KEPT)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.filterwarnings("ignore:.*scale_loss:UserWarning")
@pytest.mark.filterwarnings("ignore:.*was written to between two steps:UserWarning")
def test_programs_give_the_same_bits_on_the_host(
    level: str, storage: str, part: int, pytestconfig: pytest.Config
) -> None:
    """Where all is on the CPU; what moves is in ``tests/devices/test_host_programs.py``."""
    seed = pytestconfig.getoption("--hypothesis-seed")
    for number in range(4 if part == 0 else 43):
        dice = Dice(f"{seed} {level} {part} {number} {storage}")
        assert_same_at_both_places(dice.case(level, f"{storage} on the host"))


def assert_same_at_both_places(case: Case, **places: Any) -> None:
    """A case of ``place="host"`` has the bits of the same storage beside the weights."""
    beside = replace(case, storage=case.storage.removesuffix(" on the host"))
    host, device = values_of(case.run(**places)), values_of(beside.run(**places))
    assert len(host) == len(device) > len(NAMES)
    assert [torch.equal(a, b) for a, b in zip(host, device, strict=True)] == [True] * len(host), (
        f"{case}"
    )


FOUND: dict[str, list[Call]] = {
    "an overflow beneath what was left scaled, all of it zeroed": [
        Backward("b", 0, poison=True),
        Backward("b", 0, delay=True),
        Zero("model", to_none=False),
        Backward("a", 0, both=True),
        Backward("a", 0, both=True),
    ],
    "zeroed inside a block, of a weight that was frozen": [
        Backward("a", 0),
        Freeze("a.weight", trains=False),
        Backward("ab", 0, zeroes=True),
    ],
    "a quiet write before a step without gradients": [
        Write("a.weight", "data.fill_"),
        Write("b.bias", "data.fill_"),
        Step(0),
        Backward("a", 0),
    ],
    "left scaled, and an overflow of another optimizer": [
        Backward("b", 1, delay=True),
        Backward("a", 2, poison=True),
        Backward("b", 3),
    ],
    "a quiet write after a step without gradients": [
        Step(0),
        Write("a.weight", "data.fill_"),
        Backward("a", 0),
    ],
    "an overflow zeroed after a block that failed": [
        Backward("abqn", 3, poison=True),
        Backward("a", 1, loss_id=1, delay=True, fails=True),
        Zero("model", to_none=False),
        Backward("n", 2),
    ],
    "masters written after loading over a write": [
        Checkpoint("save"),
        Write("q", "fill_"),
        Checkpoint("load"),
        WriteMasters(0, "mul_"),
    ],
    "zeros beside what was left scaled": [
        Step(0),
        Backward("a", 1),
        Backward("b", 2, both=True, delay=True),
        Zero("model", to_none=False),
        Backward("b", 3, both=True),
    ],
    "dropped beside what was left scaled, and zeroed later": [
        Backward("ab", 0),
        Backward("ab", 1, delay=True),
        Zero("a.weight", to_none=True),
        Zero("b.bias", to_none=True),
        Zero(0, to_none=False),
        Zero(1, to_none=False),
    ],
    "left scaled, dropped one by one, and of another loss": [
        Backward("ab", 1, delay=True),
        *(Zero(name, to_none=True) for name in NAMES),
        Backward("ab", 2, loss_id=1),
    ],
    "an overflow of which one gradient is zeroed twice": [
        Backward("aqn", 5, poison=True),
        Zero("a.bias", to_none=False),
        Look("exact_weights"),
        Zero("model", to_none=False),
        Backward("a", 3, loss_id=1),
    ],
}

SHORT: dict[str, list[Call]] = {
    "a backward": [Backward("ab", 1)],
    "of a part": [Backward("aq", 2, both=True)],
    "of another loss": [Backward("bn", 3, loss_id=1)],
    "left scaled": [Backward("abqn", 4, delay=True)],
    "a part left scaled": [Backward("b", 5, delay=True)],
    "another loss left scaled": [Backward("ab", 1, loss_id=1, delay=True)],
    "an overflow": [Backward("ab", 2, poison=True)],
    "an overflow left scaled": [Backward("ab", 3, poison=True, delay=True)],
    "an overflow told later": [Backward("abqn", 4, poison=True, checks_late=True)],
    "a body that fails": [Backward("abqn", 5, fails=True)],
    "an overflow in a body that fails": [Backward("ab", 1, poison=True, fails=True)],
    "no block": [Backward("abqn", 2, outside=True)],
    "zeroed in the body": [Backward("ab", 3, both=True, zeroes=True)],
    "step": [Step(0), Step(1)],
    "step of one": [Step(0)],
    "steps before any gradient": [Zero("model", to_none=True), Step(0), Step(1)],
    "closure": [Step(1, 4)],
    "GradScaler": [Iteration("abqnc", 5, max_norm=2.0**-8, by="torch")],
    "GradScaler, without unscale_": [Iteration("abqnc", 5, max_norm=2.0**-8, by="preamp alone")],
    "GradScaler, an overflow": [Iteration("aqn", 1, loss_id=1, max_norm=1.0, poison=True)],
    "model, None": [Zero("model", to_none=True)],
    "model, zeros": [Zero("model", to_none=False)],
    "optimizers, None": [Zero(0, to_none=True), Zero(1, to_none=True)],
    "optimizer, zeros": [Zero(0, to_none=False)],
    "some, None": [Zero("a.weight", to_none=True), Zero("b.bias", to_none=True)],
    "some, zeros": [Zero("a.weight", to_none=False), Zero("n.weight", to_none=False)],
    "clip": [Clip(0, 2.0**-8)],
    "clip of masters": [Clip(1, 2.0**-8, "masters")],
    "clip of the model": [Clip(0, math.inf, "model")],
    "read": [Read(name) for name in NAMES],
    "read one": [Read("a.weight")],
    "filled": [Write("a.weight", "fill_"), Write("b.bias", "fill_")],
    "multiplied": [Write("q", "mul_")],
    "assigned": [Write("b.weight", "data =")],
    "filled without a trace": [Write("a.bias", "data.fill_")],
    "written exactly": [Write("a.weight", "exact")],
    "masters multiplied": [WriteMasters(0, "mul_")],
    "masters copied to": [WriteMasters(1, "copy_")],
    "masters assigned": [WriteMasters(0, "data =")],
    "masters filled without a trace": [WriteMasters(1, "data.fill_")],
    "moved by the optimizer": [Halve(0)],
    "a layer more": [Add()],
    "frozen": [Freeze("a.weight")],
    "thawed": [Freeze("b.weight", trains=True)],
    "forward": [Look("forward")],
    "copy": [Look("deepcopy")],
    "state": [Look("state_dict")],
    "exact weights": [Look("exact_weights")],
    "loaded": [Checkpoint("save"), Checkpoint("load")],
    "restarted": [Checkpoint("save"), Checkpoint("restart")],
    "again": [Again("O2")],
    "again, in float32": [Again("O0")],
    "again, split": [Again("O5", splits=True)],
}
"""What a script may do, in few calls."""
SCALES = ("dynamic", 128.0, 1.0)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("first", SHORT)
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 6, 9))])
@pytest.mark.filterwarnings("ignore:.*scale_loss:UserWarning")
@pytest.mark.filterwarnings("ignore:.*was written to between two steps:UserWarning")
def test_each_thing_may_follow_each_other(level: str, first: str, turn: int) -> None:
    """Between two backwards; each turn has half of all pairs at some level, all have each twice."""
    turn += LEVEL_NAMES.index(level) + list(SHORT).index(first)
    for number, second in enumerate(SHORT):
        if (turn + number) % 12 == 0:
            frozen = ("b.weight",) if "thawed" in (first, second) else ()
            ends: list[list[Call]] = [[], [Backward("ab", 2, loss_id=1)]]
            program = [Backward("abqn", 0), *SHORT[first], *SHORT[second], *ends[number // 12 % 2]]
            run(program, level, loss_scale=SCALES[(turn + number // 12) % 3], frozen=frozen)


@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_an_overflow_beneath_rescaled_zeros_skips_the_step(level: str) -> None:
    """Zeros with signs are no zeroing, but a rescaled gradient of a loss that was masked out."""
    world = World(level, loss_scale="dynamic")
    before = world.ours.q.detach().clone()
    Backward("q", 0, poison=True).run(world)
    masked = loss_of(world.ours, "q", 0) * 0.0
    with preamp.scale_loss(masked, world.opts[0], delay_unscale=True) as scaled:
        scaled.backward()
    assert world.ours.q.grad is not None
    world.ours.q.grad.div_(2)
    with preamp.scale_loss(loss_of(world.ours, "q", 0), world.opts[0]) as scaled:
        scaled.backward()
    world.opts[0].step()
    assert world.engine.last_step_skipped
    assert torch.equal(world.ours.q, before)


# Random programs combine levels and storages freely; here each program needs each of them once.
@pytest.mark.pairs
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", FOUND)
@pytest.mark.filterwarnings("ignore:.*was written to between two steps:UserWarning")
def test_programs_that_went_wrong(level: str, storage: str, name: str) -> None:
    """What random programs have found."""
    is_plain = STORAGES[storage].moments == "float32" and storage not in ON_HOST
    optimizer = "SGD" if is_plain else "FusedSGD"
    run(FOUND[name], level, optimizer, loss_scale="dynamic", storage=storage)


def test_what_fails_is_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a long program those calls are left that show a fault."""
    monkeypatch.setattr(World, "plain_step", lambda self, optimizer: None)
    program = [
        Look("forward"),
        Backward("ab", 3, zeroes=True),
        Read("q"),
        Backward("a", 1, both=True),
        Step(1),
        Step(0),
        Zero("model", to_none=True),
        Backward("q", 1),
    ]
    case = smallest(Case(program, "O2", "SGD", None, ()))
    assert case.program == [Backward("q", 1)]  # a program ends with a step of each optimizer


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
