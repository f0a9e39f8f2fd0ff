# SPDX-License-Identifier: BSD-3-Clause
"""Ctrl-C at every line of preamp that ``initialize`` and ``close`` run.

After each one all is as before the first ``initialize``, or ``close`` makes it so. Lines are
counted off with ``sys.settrace``, so that each is hit and none by chance.
"""

from __future__ import annotations

import gc
import linecache
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import preamp
from cases.levels import LEVEL_NAMES
from engine.harness import differences, picture, train_plain, train_step
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


def interrupt(call: Callable[[], object], line: Line) -> bool:
    """Run ``call``, and raise a ``KeyboardInterrupt`` before ``line``; whether it came there."""
    times = 0

    def in_frame(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal times
        if event == "line" and frame.f_lineno == line.number:
            times += 1
            if times == line.nth:
                raise KeyboardInterrupt
        return in_frame

    def at_call(frame: FrameType, event: str, arg: object) -> Any:
        return in_frame if frame.f_code is line.code else None

    has_come = False
    try:
        _traced(call, at_call)
    except KeyboardInterrupt:
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
            CASTS.pushes.is_stale,
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


def check_initialize(level: str, every: int = 1, offset: int = 0, **options: Any) -> None:
    subjects = Subjects(level, **options)
    lines = lines_of(subjects.initialize)
    subjects.close()
    hits = 0
    for line in (wanted := sample(lines, every, offset)):
        hits += interrupt(subjects.initialize, line)
        subjects.check(None, line)
    assert hits >= 0.8 * len(wanted)  # caches spare some lines
    subjects.check_usable()


def check_close(level: str, every: int = 1, offset: int = 0, **options: Any) -> None:
    subjects = Subjects(level, **options)
    subjects.initialize()
    hits = 0
    wanted = sample(lines_of(preamp.engine_of(subjects.model).close), every, offset)
    for line in wanted:
        subjects.initialize()
        engine = preamp.engine_of(subjects.model)
        hits += interrupt(engine.close, line)
        subjects.check(engine, line)
    assert hits >= 0.8 * len(wanted)
    subjects.check_usable()


CHECKS = pytest.mark.parametrize("check", [check_initialize, check_close])
WATCHED = {"numerics": "full", "overflow": "trace", "loss_scale": "dynamic"}


@pytest.mark.full
@CHECKS
@pytest.mark.parametrize("options", [{}, WATCHED], ids=["plain", "watched"])
@pytest.mark.parametrize("level", LEVEL_NAMES)
def test_every_line(check: Callable[..., None], level: str, options: dict[str, Any]) -> None:
    check(level, **options)


def test_every_line_of_the_close_of_a_float32_model() -> None:
    check_close("O0")


@CHECKS
@pytest.mark.parametrize(("level", "offset"), [("O0", 0), ("O1", 1), ("O2", 2), ("O5", 3)])
def test_some_lines(check: Callable[..., None], level: str, offset: int) -> None:
    check(level, every=50, offset=5 * offset)


@pytest.mark.parametrize(("check", "level"), [(check_initialize, "O2"), (check_close, "O1")])
def test_some_lines_with_statistics_and_tracing(check: Callable[..., None], level: str) -> None:
    check(level, every=50, offset=25, **WATCHED)
