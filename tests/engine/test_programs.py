# SPDX-License-Identifier: BSD-3-Clause
"""Whatever a script calls in whatever order, it gets what plain torch computes in float64."""

import functools
import itertools
import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.host_reads import NoHostReads, far_from_the_host
from cases.levels import EXACT, LEVEL_NAMES, WITH_MASTERS
from cases.ranks import one_rank
from cases.selection import SUITE
from engine.programs import (
    COPIES,
    NAMES,
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
    Variant,
    World,
    Write,
    WriteMasters,
    Zero,
    program,
    run,
    values_of,
)
from kit.run import Run, differing
from preamp.core.torch_private import extremes
from preamp.kernels.plain import tally
from preamp.numerics import RunRecord, read_history
from preamp.watch import host_copies, observation

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
    variant: Variant | None = None

    def run(self, **places: Any) -> World:
        kept: Any = {"storage": self.storage, "variant": self.variant}
        options: Any = {"frozen": self.frozen, **kept, **places}
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

    def case(self, level: str, storage: str = "full", *, is_fused: bool = False) -> Case:
        keeps = is_fused or STORAGES[storage] != STORAGES["full"]
        optimizers = [kind for kind in OPTIMIZERS if "Fused" in kind or not keeps]
        # Where the optimizer's arithmetic is float16 its formula counts, and so does each rounding.
        optimizer = self.one(["SGD"] if level == "O3" else optimizers)
        loss_scale = self.one([None, 1.0, 128.0, "dynamic"], [1, 1, 1, 2])
        frozen: tuple[str, ...] = self.one([(), ("b.weight",), ("a.bias", "q")], [2, 1, 1])
        program = [call for _ in range(self.number(1, 5)) for call in self.iteration()]
        return Case(program, level, optimizer, loss_scale, frozen, storage)

    def loop(self, level: str, storage: str) -> Case:
        """Ordinary iterations."""
        plain = "SGD" if storage == "full" else "FusedSGD"
        optimizer = self.one([plain, "FusedSGD"] if level == "O3" else [plain, "FusedAdam"])
        program = list[Call]()
        for _ in range(self.number(2, 5)):
            parts, both = self.one(["a", "ab", "aqn", "abqnc"]), self.happens()
            for count in range(self.number(1, 3), 0, -1):
                delay, poison = count > 1 and self.happens(), self.happens(rarely=True)
                program += [Backward(parts, self.number(0, 5), 0, delay, both, poison)]
            if self.happens():
                program += [Clip(self.one([0, 1]), 2.0**-6)]
            program += [Step(0), Step(1), Zero("model", to_none=True)]
        frozen: tuple[str, ...] = self.one([(), ("b.weight",), ("a.bias", "q")])
        loss_scale = self.one([128.0, "dynamic"])
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
            by=self.one(["preamp", "torch", "alone"]),
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
            (1, lambda: Write(self.one(NAMES), self.one(["fill_", "mul_", "assigned", "exact"]))),
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
                    self.one(NAMES), self.one(["fill_", "mul_", "assigned", "data.fill_", "exact"])
                ),
            ),
            (2, self.write_masters),
            (1, self.freeze),
            (1, self.look),
            (3, lambda: Checkpoint(self.one(["save", "load", *RESTARTS]))),
            (1, lambda: Again(self.one(LEVEL_NAMES), splits=self.happens())),
            (1, lambda: Halve(self.one([0, 1]))),
            (1, Add),
            (1, lambda: Pair(self.number(0, 5), self.one([*COPIES]))),
        ]
        return self.one([make for _, make in makers], [weight for weight, _ in makers])()

    def write_masters(self) -> Call:
        return WriteMasters(self.one([0, 1]), self.one(["mul_", "copy_", "assigned"]))

    def freeze(self) -> Call:
        return Freeze(self.one(NAMES), self.one([True, False]))

    def look(self) -> Call:
        return Look(self.one(["forward", "deepcopy", "state_dict", "exact_weights"]))


RESTARTS: list[Any] = ["restart", "loaded_before", "file"]
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


PARTS = [0, pytest.param(1, marks=pytest.mark.full)]


# Warnings of a dynamic scale without a block, and of moments in fewer bits
variants = pytest.mark.filterwarnings(
    "ignore:.*scale_loss:UserWarning", "ignore:.*was written to between two steps:UserWarning"
)


@variants
@pytest.mark.parametrize(
    ("level", "storage"),
    [
        *itertools.product(LEVEL_NAMES, ["full"]),
        *itertools.product(WITH_MASTERS, ["split"]),
        *itertools.product(EXACT, ["compact", "bfloat16"]),
    ],
)
@pytest.mark.parametrize("part", PARTS)
def test_programs_do_what_plain_torch_does(
    level: str, storage: str, part: int, pytestconfig: pytest.Config
) -> None:
    """Other programs are tried with ``--hypothesis-seed``."""
    seed = f"{pytestconfig.getoption('--hypothesis-seed')} {level} {part}"
    kept = "" if storage == "full" else f" {storage}"
    count = {"full": 33, "split": 15}.get(storage, 8) if part == 0 else 43
    try_all(Dice(f"{seed} {number}{kept}").case(level, storage) for number in range(count))


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("backend", ["plain", "reference"])
@pytest.mark.more
@variants
def test_programs_do_so_without_compiled_kernels(level: str, backend: str) -> None:
    """To a few ulps, as formulas are not the same in torch's own kernels."""
    try_all(
        replace(Dice(f"{level} {number} {backend}").case(level), variant=variant)
        for variant in [Variant({"backend": backend})]
        for number in range(4 if os.environ[SUITE] == "quick" else 25)
    )


KEPT = [*itertools.product(EXACT, ["full"]), *itertools.product(WITH_MASTERS, ["split", "compact"])]


@pytest.mark.parametrize(("level", "storage"), KEPT)
@pytest.mark.more
@variants
def test_programs_give_the_same_bits_on_the_host(
    level: str, storage: str, pytestconfig: pytest.Config
) -> None:
    """Where all is on the CPU; what moves is in ``tests/devices/test_programs_on_a_device.py``."""
    seed = pytestconfig.getoption("--hypothesis-seed")
    for number in range(4 if os.environ[SUITE] == "quick" else 25):
        case = Dice(f"{seed} {level} 0 {number} {storage}").case(level, f"{storage} on the host")
        assert_same_bits(case, replace(case, storage=storage))


def assert_same_bits(*cases: Case, **places: Any) -> None:
    """All cases end with the same weights, moments and loss scales."""
    first, *others = [values_of(case.run(**places)) for case in cases]
    for case, other in zip(cases[1:], others, strict=True):
        assert len(first) == len(other) > len(NAMES)
        alike = [torch.equal(a, b) for a, b in zip(first, other, strict=True)]
        assert alike == [True] * len(first), f"{case}"


# -- variants of one program ----------------------------------------------------------------------


def assert_variant(level: str, variant: Variant, seed: str, count: int = 3) -> None:
    """Random programs give the same bits with it and without."""
    for number in range(count if os.environ[SUITE] == "quick" else 6):
        case = Dice(f"{level} {number} {seed}").case(level)
        if variant.door is not preamp:  # takes clips of scaled gradients as Apex did
            clips = [call for call in case.program if isinstance(call, Clip) and call.by == "model"]
            case = replace(case, program=[call for call in case.program if call not in clips])
        assert_same_bits(case, replace(case, variant=variant))


VARIANTS: dict[str, Variant] = {
    "traced": Variant({"overflow": "trace"}),
    "measured": Variant({"numerics": "full", "numerics_every": 1}),
    "measured at times": Variant({"numerics": "light", "numerics_every": 2}),
    "watched by all": Variant({"numerics": "full", "numerics_every": 2, "overflow": "trace"}),
    "the whole thread": Variant({"scope": "thread"}),
    "the other door": Variant(door=preamp.amp),
}


@pytest.mark.more
@variants
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_have_the_same_bits(level: str, name: str) -> None:
    assert_variant(level, VARIANTS[name], name)


@variants
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_a_history_has_what_its_file_has(level: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"  # of one program: the engine of another would go on with it
    case = Dice(f"{level} 0 history").case(level)
    assert_same_bits(case, replace(case, variant=Variant({"history": path})))
    assert {type(record) for record in read_history(path)} >= {RunRecord}


@variants
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("beside", LEVEL_NAMES)
@pytest.mark.parametrize("scope", ["model", "thread"])
def test_engines_beside_each_other_do_as_alone(level: str, beside: str, scope: str) -> None:
    """Each trains within the blocks of the other one, and between all of its acts."""
    options: Any = {"loss_scale": "dynamic", "scope": scope}
    other, count, numbers = Run(beside, "Adam", **options), itertools.count(), list[Any]()

    def between() -> None:
        number = next(count)
        if number < 12:
            other.play(f"backward {number}{' inf' * (number == 2)}; clip; step; zero")
        elif number == 12:  # which the other one does not notice either
            numbers.append(other.numbers())
            other.close()

    assert_variant(level, Variant(between=between), f"{beside} {scope}", count=1)
    numbers = numbers or [other.numbers()]
    assert not differing(numbers[0], Run(beside, "Adam", **options).play(*other.log).numbers())


@variants
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_one_rank_has_the_same_bits(level: str) -> None:
    """Under ``DistributedDataParallel``."""
    wrap = functools.partial(DistributedDataParallel, find_unused_parameters=True)
    with one_rank():
        for number in range(3):
            case = Dice(f"{level} {number} rank").loop(level, "full")
            assert_same_bits(case, replace(case, variant=Variant(wraps=wrap)))


FAR: dict[str, dict[str, Any]] = {
    "unwatched": {},
    "traced": {"overflow": "trace"},
    "measured": {"numerics": "full", "numerics_every": 100},  # read where the next is due
}


@variants
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("storage", ["full", "split", "compact"])
@pytest.mark.parametrize("watched", FAR)
def test_far_from_the_host(
    level: str, storage: str, watched: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device decides what is skipped: no value is read in a block or a fused step."""
    far_from_the_host(monkeypatch)
    for room in (tally, host_copies):
        monkeypatch.setattr(room, "host_reaches", lambda _: False)
    for room in (observation, extremes):  # so that what refuses reads hears of the watchers' own
        monkeypatch.setattr(room, "without_modes", nullcontext)
    for number in range(2):
        case = Dice(f"{level} {number} far").loop(level, storage)
        replace(case, variant=Variant(FAR[watched], unread=NoHostReads)).run()


FOUND_IN_WORDS = {
    "an overflow beneath what was left scaled, all of it zeroed": (
        "Backward b 0 poison; Backward b 0 delay; Zero model; Backward a 0 both; Backward a 0 both"
    ),
    "zeroed inside a block, of a weight that was frozen": (
        "Backward a 0; Freeze a.weight; Backward ab 0 zeroes"
    ),
    "rows and bytes written before the first block and after a step": (
        "Write a.weight rows; Write b.weight numpy; Look deepcopy; Backward ab 0; Step 0; Step 1; "
        "Write a.weight rows; Write b.bias numpy; Look exact_weights; Backward ab 1; Step 0; "
        "Write a.bias rows; Write a.weight numpy; Look state_dict; Backward ab 2"
    ),
    "a quiet write before a step without gradients": (
        "Write a.weight data.fill_; Write b.bias data.fill_; Step 0; Backward a 0"
    ),
    "left scaled, and an overflow of another optimizer": (
        "Backward b 1 delay; Backward a 2 poison; Backward b 3"
    ),
    "a quiet write after a step without gradients": (
        "Step 0; Write a.weight data.fill_; Backward a 0"
    ),
    "an overflow zeroed after a block that failed": (
        "Backward abqn 3 poison; Backward a 1 1 delay fails; Zero model; Backward n 2"
    ),
    "masters written after loading over a write": (
        "Checkpoint save; Write q fill_; Checkpoint load; WriteMasters 0 mul_"
    ),
    "zeros beside what was left scaled": (
        "Step 0; Backward a 1; Backward b 2 delay both; Zero model; Backward b 3 both"
    ),
    "dropped beside what was left scaled, and zeroed later": (
        "Backward ab 0; Backward ab 1 delay; Zero a.weight to_none; Zero b.bias to_none; Zero "
        "0; Zero 1"
    ),
    "left scaled, dropped one by one, and of another loss": (
        "Backward ab 1 delay; Zero a.weight to_none; Zero a.bias to_none; Zero q to_none; Zero "
        "n.weight to_none; Zero n.bias to_none; Zero b.weight to_none; Zero b.bias to_none; "
        "Backward ab 2 1"
    ),
    "a norm that the script zeroes": "Backward a 0; Clip 0 64.0; Step 0",
    "a clip before another backward": "Backward a 0; Clip 0 0.5; Backward a 1; Step 0",
    "a clip before the model is zeroed": "Backward a 0 1; Clip 0 0.5; Zero model to_none; Step 0",
    "two losses to a step": "Backward ab 0; Backward ab 1 1; Step 0; Step 1",
    "an overflow of the second optimizer": "Backward a 0; Backward b 0 poison",
    "restarted after a skipped step": (
        "Backward ab 0 poison; Step 0; Step 1; Zero model to_none; Checkpoint save; Checkpoint "
        "restart; Backward ab 1"
    ),
    "one optimizer of two is zeroed": "Backward ab 0 both; Zero 0 to_none; Step 0; Step 1",
    "an overflow of which one gradient is zeroed twice": (
        "Backward aqn 5 poison; Zero a.bias; Look exact_weights; Zero model; Backward a 3 1"
    ),
}
"""What random programs have found."""
FOUND = {name: program(text) for name, text in FOUND_IN_WORDS.items()}
SHORT_IN_WORDS = {
    "a backward": "Backward ab 1",
    "of a part": "Backward aq 2 both",
    "of another loss": "Backward bn 3 1",
    "left scaled": "Backward abqn 4 delay",
    "a part left scaled": "Backward b 5 delay",
    "another loss left scaled": "Backward ab 1 1 delay",
    "an overflow": "Backward ab 2 poison",
    "an overflow left scaled": "Backward ab 3 delay poison",
    "an overflow told later": "Backward abqn 4 poison checks_late",
    "a body that fails": "Backward abqn 5 fails",
    "an overflow in a body that fails": "Backward ab 1 poison fails",
    "no block": "Backward abqn 2 outside",
    "zeroed in the body": "Backward ab 3 both zeroes",
    "step": "Step 0; Step 1",
    "step of one": "Step 0",
    "steps before any gradient": "Zero model to_none; Step 0; Step 1",
    "closure": "Step 1 4",
    "GradScaler": "Iteration abqnc 5 0 0.00390625",
    "GradScaler, without unscale_": "Iteration abqnc 5 0 0.00390625 alone",
    "GradScaler, an overflow": "Iteration aqn 1 1 1.0 poison",
    "model, None": "Zero model to_none",
    "model, zeros": "Zero model",
    "optimizers, None": "Zero 0 to_none; Zero 1 to_none",
    "optimizer, zeros": "Zero 0",
    "some, None": "Zero a.weight to_none; Zero b.bias to_none",
    "some, zeros": "Zero a.weight; Zero n.weight",
    "clip": "Clip 0 0.00390625",
    "clip of masters": "Clip 1 0.00390625 masters",
    "clip of the model": "Clip 0 inf model",
    "read": (
        "Read a.weight; Read a.bias; Read q; Read n.weight; Read n.bias; Read b.weight; Read b.bias"
    ),
    "read one": "Read a.weight",
    "filled": "Write a.weight fill_; Write b.bias fill_",
    "multiplied": "Write q mul_",
    "assigned": "Write b.weight assigned",
    "filled without a trace": "Write a.bias data.fill_",
    "written exactly": "Write a.weight exact",
    "masters multiplied": "WriteMasters 0 mul_",
    "masters copied to": "WriteMasters 1 copy_",
    "masters assigned": "WriteMasters 0 assigned",
    "masters filled without a trace": "WriteMasters 1 data.fill_",
    "moved by the optimizer": "Halve 0",
    "a layer more": "Add",
    "frozen": "Freeze a.weight",
    "thawed": "Freeze b.weight trains",
    "forward": "Look forward",
    "copy": "Look deepcopy",
    "state": "Look state_dict",
    "exact weights": "Look exact_weights",
    "copied": "Pair 3",
    "pickled": "Pair 2 pickle",
    "loaded": "Checkpoint save; Checkpoint load",
    "restarted": "Checkpoint save; Checkpoint restart",
    "restarted, loaded before": "Checkpoint save; Checkpoint loaded_before",
    "from a file": "Checkpoint file",
    "again": "Again O2",
    "again, in float32": "Again O0",
    "again, split": "Again O5 splits",
}
"""What a script may do, in few calls."""
SHORT = {name: program(text) for name, text in SHORT_IN_WORDS.items()}
SCALES = ("dynamic", 128.0, 1.0)


@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("first", SHORT)
@pytest.mark.parametrize("turn", [0, *(pytest.param(n, marks=pytest.mark.full) for n in (3, 6, 9))])
@variants
def test_each_thing_may_follow_each_other(level: str, first: str, turn: int) -> None:
    """Between two backwards; each turn has half of all pairs at some level, all have each twice."""
    turn += LEVEL_NAMES.index(level) + list(SHORT).index(first)
    for number, second in enumerate(SHORT):
        if (turn + number) % 12 == 0:
            frozen = ("b.weight",) if "thawed" in (first, second) else ()
            ends: list[list[Call]] = [[], [Backward("ab", 2, loss_id=1)]]
            program = [Backward("abqn", 0), *SHORT[first], *SHORT[second], *ends[number // 12 % 2]]
            run(program, level, loss_scale=SCALES[(turn + number // 12) % 3], frozen=frozen)


# Random programs combine levels and storages freely; here each program needs each of them once.
@pytest.mark.pairs
@pytest.mark.parametrize("level", LEVEL_NAMES)
@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("name", FOUND)
@variants
def test_programs_that_went_wrong(level: str, storage: str, name: str) -> None:
    optimizer = "SGD" if STORAGES[storage] == STORAGES["full"] else "FusedSGD"
    places: Any = {"storage": storage, "variant": VARIANTS["measured"]}
    run(FOUND[name], level, optimizer, loss_scale="dynamic", **places)


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


def _overflow_missed(self: World, i: int, scaler: Any = None) -> None:
    self.overflowed[i] = False
    _STEP(self, i, scaler)


_THEIRS, _STEP = World.theirs, World.step
PLANTED: dict[str, tuple[str, Any]] = {
    "another batch": ("theirs", lambda self, p, i, **more: _THEIRS(self, p, i + 1, **more)),
    "an overflow that nobody saw": ("step", _overflow_missed),
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
