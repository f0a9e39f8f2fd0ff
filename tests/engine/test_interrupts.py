# SPDX-License-Identifier: BSD-3-Clause
"""Ctrl-C at every line of preamp that ``initialize`` and ``close`` run.

After each one all is as before the first ``initialize``, or ``close`` makes it so. Lines are
counted off with ``sys.settrace``, so that each is hit and none by chance.
"""

import gc
import itertools
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import preamp
from cases.levels import LEVEL_NAMES
from cases.models import Exact, loss_of
from cases.ranks import one_rank
from kit.compare import differences, picture, same
from kit.loops import train_plain, train_step
from kit.run import Run
from preamp.casting.functions import FUNCTION_CASTS
from preamp.casting.patches import PATCH_LOCK, PATCHES
from preamp.casting.thread_casts import CASTS

FOLDER = str(Path(preamp.__file__).parent)


class Line(NamedTuple):
    """A line that runs for the ``nth`` time, counted from 1."""

    code: CodeType
    number: int
    nth: int

    def __str__(self) -> str:
        return f"{self.code.co_filename}:{self.number} in {self.code.co_name}, time {self.nth}"


def lines_of(call: Callable[[], object]) -> list[Line]:
    """Every line of preamp that ``call`` runs, in order."""
    seen: Counter[tuple[CodeType, int]] = Counter()
    lines: list[Line] = []

    blocks: Counter[tuple[int, int]] = Counter()

    def in_frame(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            place = frame.f_code, frame.f_lineno
            seen[place] += 1
            if _text(frame).startswith("with "):
                blocks[id(frame), frame.f_lineno] += 1
                # Python handles no signal between the end of a block and its ``__exit__``.
                if blocks[id(frame), frame.f_lineno] % 2 == 0:
                    return in_frame
            if _begins_finally(frame):
                return in_frame
            lines.append(Line(*place, seen[place]))
        return in_frame

    def at_call(frame: FrameType, event: str, arg: object) -> Any:
        return in_frame if frame.f_code.co_filename.startswith(FOLDER) else None

    _traced(call, at_call)
    return lines


def _text(frame: FrameType, before: int = 0) -> str:
    return linecache.getline(frame.f_code.co_filename, frame.f_lineno - before).strip()


def _begins_finally(frame: FrameType) -> bool:
    """Whether Python handles no signal before the line: it does so after calls and jumps back."""
    return _text(frame, 2 if _text(frame, 1) == "try:" else 1) == "finally:"


def interrupt(
    call: Callable[[], object], line: Line, error: type[BaseException] = KeyboardInterrupt
) -> bool:
    """Run ``call``, and raise ``error`` before ``line``; whether it came there."""
    times = 0

    def in_frame(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal times
        if event == "line" and frame.f_lineno == line.number:
            times += 1
            if times == line.nth:
                raise error
        return in_frame

    def at_call(frame: FrameType, event: str, arg: object) -> Any:
        return in_frame if frame.f_code is line.code else None

    has_come = False
    try:
        _traced(call, at_call)
    except error:
        has_come = True
    assert has_come == (times == line.nth), f"an interrupt at {line} was swallowed"
    return has_come


def _traced(call: Callable[[], object], trace: Any) -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)


@pytest.fixture(autouse=True)
def no_collection() -> Iterator[None]:
    """Finalizers that run at any line would be interrupted in the place of what is tested."""
    gc.disable()
    yield
    gc.enable()


class Subjects:
    """A model and an optimizer that were trained a step, and what they and torch were then."""

    def __init__(self, level: str, **options: Any) -> None:
        self.options = {"opt_level": level, "verbosity": 0, **options}
        self.model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.125, momentum=0.5)
        train_plain(self.model, self.optimizer, 0)
        self.initialize()  # what is made once stays
        self.close()
        self.before = self.now()

    def initialize(self) -> None:
        preamp.initialize(self.model, self.optimizer, **self.options)

    def close(self) -> None:
        preamp.engine_of(self.model).close()

    def now(self) -> dict[str, Any]:
        process = (
            len(PATCHES._patched),
            FUNCTION_CASTS.is_installed,
            len(CASTS.pushes),
            torch.backends.mha.get_fastpath_enabled(),
            str(vars(sys.modules["torch.optim.optimizer"]).get("_foreach_supported_types")),
        )
        seen = picture(self.model, self.optimizer)
        for name, param in self.model.named_parameters():  # cast, and the same numbers again
            seen[f"0.{name}.grad"] = None if param.grad is None else param.grad.clone()
        if self.options["opt_level"] == "O3":  # which keeps no exact numbers
            for state in self.optimizer.state:
                momentum = self.optimizer.state[state]["momentum_buffer"]
                seen[f"1.state.{id(state)}"] = momentum.clone()
        return {**seen, "process": process}

    def changes(self) -> list[str]:
        return differences(self.before, self.now())

    def check(self, engine: preamp.Engine | None, line: Line) -> None:
        """All is as before, or can be closed to be."""
        if self.changes():
            (preamp.engine_of(self.model) if engine is None else engine).close()
            assert self.changes() == [], f"after an interrupt at {line}"

    def check_usable(self) -> None:
        """Afterwards another engine trains, and another thread can patch."""
        self.initialize()
        train_step(self.model, self.optimizer, 1)
        self.close()
        thread = threading.Thread(target=PATCH_LOCK.held(lambda: None), daemon=True)
        thread.start()
        thread.join(timeout=20)
        assert not thread.is_alive(), "the lock is held for ever"


def sample(lines: list[Line], every: int, offset: int) -> list[Line]:
    """Each line the first and the last time that it runs; every so many of these."""
    first: dict[tuple[CodeType, int], Line] = {}
    last: dict[tuple[CodeType, int], Line] = {}
    for line in lines:
        first.setdefault(line[:2], line)
        last[line[:2]] = line
    return list(dict.fromkeys((*first.values(), *last.values())))[offset::every]


def check_lines(what: str, level: str, every: int = 1, offset: int = 0, **options: Any) -> None:
    subjects = Subjects(level, **options)
    call = subjects.close if what == "close" else subjects.initialize
    if what == "close":
        subjects.initialize()
    wanted = sample(lines_of(call), every, offset)
    if what == "initialize":
        subjects.close()
    hits, engine = 0, None
    for line in wanted:
        if what == "close":
            subjects.initialize()
            engine = preamp.engine_of(subjects.model)
        hits += interrupt(call, line)
        subjects.check(engine, line)
    assert hits >= 0.8 * len(wanted)  # caches spare some lines
    subjects.check_usable()


WATCHED = {"numerics": "full", "overflow": "trace", "loss_scale": "dynamic"}


@pytest.mark.full
@pytest.mark.parametrize("what", ["initialize", "close"])
@pytest.mark.parametrize(
    ("level", "options"),
    [("O0", {}), *((level, WATCHED) for level in LEVEL_NAMES)],
    ids=["O0", *(f"{level} watched" for level in LEVEL_NAMES)],
)
def test_every_line(what: str, level: str, options: dict[str, Any]) -> None:
    """An engine that watches runs all lines of one that does not, but two that O0 has."""
    check_lines(what, level, **options)


@pytest.mark.parametrize(
    ("what", "level", "offset", "options"),
    [
        ("initialize", "O0", 0, {}),
        ("close", "O1", 5, {}),
        ("initialize", "O2", 10, {}),
        ("close", "O5", 15, {}),
        ("initialize", "O2", 25, WATCHED),
        ("close", "O1", 25, WATCHED),
    ],
)
def test_some_lines(what: str, level: str, offset: int, options: dict[str, Any]) -> None:
    check_lines(what, level, 50, offset, **options)


# -- lines that begin or end a backward -------------------------------------------------------
#
# After each one the engine stands where it does without the block, or where it does after the whole
# of it: a step, and a further iteration, give the very same numbers and loss scale.


SCALE = 2.0**10


class Blocks(Run):
    """A training whose blocks are entered and left call by call."""

    def __init__(self, level: str, count: int, scale: float | str, **options: Any) -> None:
        super().__init__(level, "SGD", Exact, count=count, loss_scale=scale, **options)
        if scale == "dynamic":
            self.engine.scaler(0).set_scale(SCALE)
            self.engine.scaler(0).growth_tracker.fill_(1998)
        self.block: AbstractContextManager[torch.Tensor] | None = None

    def enter(self, index: int, factor: float = 1.0, **options: Any) -> None:
        self.block = preamp.scale_loss(self.loss(index) * factor, self.optimizers, **options)
        self.scaled = self.block.__enter__()

    def leave(self) -> None:
        assert self.block is not None
        block, self.block = self.block, None
        block.__exit__(None, None, None)

    def finish(self) -> list[Any]:
        """`go_on`, and close the engine: the next one would walk over those that are open."""
        seen = self.go_on()
        self.close()
        return seen

    def go_on(self) -> list[Any]:
        """A step with what is there, then whole iterations; return all that came of it."""
        seen: list[Any] = [[None if p.grad is None else p.grad.clone() for p in self.params()]]
        for program in ("", "step", "zero; iterate 7", "iterate 8"):
            seen.append(self.play(program).numbers())
            del seen[-1]["gradients"]  # of the model: masters have them, too, or alone
        return seen


Part = Callable[[Blocks], Callable[[], object]]


def ending(**options: Any) -> Part:
    """What runs from the end of the body on."""

    def part(run: Blocks) -> Callable[[], object]:
        run.enter(2, **options)
        run.scaled.backward()
        return run.leave

    return part


def beginning(run: Blocks) -> Callable[[], object]:
    return lambda: run.enter(2)


def end_block(run: Blocks) -> None:
    if run.block is not None:
        run.scaled.backward()
        run.leave()


def prepared(level: str, count: int, program: str = "") -> Any:
    """A run that has taken a step."""
    run = Blocks(level, count, 8.0 if level == "O5" else "dynamic")
    return run.play("iterate", program)


def check(
    level: str,
    count: int,
    before: str,
    part: str,
    every: int = 1,
    offset: int = 0,
    error: type[BaseException] = KeyboardInterrupt,
) -> None:
    """Interrupt a part at every so many of its lines, in a run for each."""
    program, begin = BEFORE[before], PARTS[part]
    other = prepared(level, 1)  # while it is open, casts stay where they are
    allowed = [prepared(level, count, program).finish()]
    run = prepared(level, count, program)
    lines = sample(lines_of(begin(run)), every, offset)
    end_block(run)
    allowed.append(run.finish())
    hits = 0
    for line in lines:
        run = prepared(level, count, program)
        hits += interrupt(begin(run), line, error)
        run.block = None
        seen = run.finish()
        assert any(same(seen, one) for one in allowed), f"after an interrupt at {line}"
    assert hits >= 0.8 * len(lines)
    other.engine.close()


OVERFLOWS = ending(factor=float("inf"))
PARTS = {"end": ending(), "end after overflow": OVERFLOWS, "beginning": beginning}
BEFORE = {"nothing": "", "accumulated": "backward 1"}


KINDS = [(level, count) for level in ("O1", "O2", "O5") for count in (1, 2)]


@pytest.mark.full
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(("level", "count"), KINDS)
def test_many_lines_of_a_block(level: str, count: int, part: str, before: str) -> None:
    """Every sixth, others for each kind: two thirds of a beginning, four fifths of an end."""
    check(level, count, before, part, len(KINDS), KINDS.index((level, count)))


@pytest.mark.parametrize(
    ("level", "count", "before", "part"),
    [
        ("O1", 1, "accumulated", "end"),
        ("O2", 2, "nothing", "end"),
        ("O2", 1, "accumulated", "end after overflow"),
        ("O5", 2, "accumulated", "end"),
        ("O1", 2, "nothing", "end"),
        ("O2", 1, "accumulated", "beginning"),
    ],
)
def test_some_lines_of_a_block(level: str, count: int, before: str, part: str) -> None:
    check(level, count, before, part, 120, 60)


@pytest.mark.full
@pytest.mark.parametrize(
    ("level", "part"), [*itertools.product(("O1", "O2"), PARTS), ("O5", "end")]
)
@pytest.mark.parametrize("before", BEFORE)
def test_an_error_at_every_line_of_a_block(level: str, before: str, part: str) -> None:
    """Such as of an allocation: what it leaves is complete or undone, and the next block begins."""
    check(level, 1, before, part, error=MemoryError)


@pytest.mark.parametrize(
    ("level", "before", "part"),
    [("O1", "accumulated", "end"), ("O2", "accumulated", "end"), ("O2", "nothing", "beginning")],
)
def test_an_error_at_some_lines_of_a_block(level: str, before: str, part: str) -> None:
    check(level, 1, before, part, 40, 20, MemoryError)


# -- a GradScaler ----------------------------------------------------------------------------------


def begun(overflows: bool) -> tuple[Blocks, Any]:
    """A run that has taken a step with a scaler, and made gradients twice for the next."""
    run = Blocks("O2", 1, "dynamic")
    scaler = preamp.GradScaler(run.optimizers)
    iterate(run, scaler, 0)
    for index in (3, 1):
        factor = float("inf") if overflows and index == 1 else 1.0
        scaler.scale(loss_of(run.models, index) * factor).backward()
    scaler.step(run.optimizer)
    return run, scaler


def iterate(run: Blocks, scaler: Any, index: int) -> None:
    scaler.scale(loss_of(run.models, index)).backward()
    scaler.step(run.optimizer)
    scaler.update()
    run.zero()


def go_on(run: Blocks, scaler: Any) -> list[Any]:
    """Two more iterations, and what comes of them."""
    run.zero()
    seen = [run.numbers()]
    for index in (7, 8):
        iterate(run, scaler, index)
        seen.append(run.numbers())
    run.engine.close()
    return seen


@pytest.mark.parametrize("overflows", [False, True])
@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_every_line_of_an_update(overflows: bool, error: type[BaseException]) -> None:
    """What it leaves is complete or to be done again."""
    other = Blocks("O2", 1, "dynamic")  # while it is open, casts stay where they are
    run, scaler = begun(overflows)
    # What has been added in place within a kernel cannot be told from what has not.
    lines = [line for line in lines_of(scaler.update) if "kernels" not in line.code.co_filename]
    lines = sample(lines, 1 if error is MemoryError else 7, 0)
    wanted, hits = go_on(run, scaler), 0
    for line in lines:
        run, scaler = begun(overflows)
        hits += interrupt(scaler.update, line, error)
        if scaler._per_optimizer_states:
            scaler.update()
        assert same(go_on(run, scaler), wanted), f"after an interrupt at {line}"
    assert hits >= 0.8 * len(lines)
    other.engine.close()


# -- a block that fails ----------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_forward_of_a_failed_block_is_forgotten(level: str) -> None:
    """What ran under ``no_sync`` in it is no reason for the scale to wait for other ranks."""
    with one_rank():
        run = Run(level, "SGD", lambda: nn.Linear(2, 1), loss_scale="dynamic")
        wrapper = DistributedDataParallel(run.model)

        def backward(factor: float, error: Exception | None = None) -> None:
            loss = wrapper(torch.ones(1, 2)).float().sum() * factor
            with preamp.scale_loss(loss, run.optimizer) as scaled:
                if error is not None:
                    raise error
                scaled.backward()

        backward(1.0)
        run.step()
        with wrapper.no_sync(), pytest.raises(OSError, match="disk"):
            backward(1.0, OSError("disk"))
        before = run.engine.loss_scale()
        backward(float("inf"))
        assert run.engine.loss_scale() == before / 2
        run.play("step; close")
