# SPDX-License-Identifier: BSD-3-Clause
"""What the doctor knows about a usage bug, what it says when it has seen one, and at which line."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from types import CodeType, FrameType
from typing import Any


class Severity(Enum):
    """How much a finding matters; ordered by `rank`."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        """0 for what costs time or deserves a look, 2 for what makes the numbers wrong."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One usage bug."""

    id: str  # ``PA`` and three digits, the first of which is the family's; never reused
    severity: Severity  # of its findings, unless a finding says otherwise
    title: str  # one line without a full stop
    why: str  # what goes wrong with the numbers, in plain sentences
    how: str  # how the doctor sees it, and what it does not see
    do: str  # what to change


def define_rule(*, id: str, severity: Severity, title: str, why: str, how: str, do: str) -> Rule:
    """Make a rule of texts in which lines may end anywhere."""
    why, how, do = (" ".join(text.split()) for text in (why, how, do))
    return Rule(id=id, severity=severity, title=title, why=why, how=how, do=do)


@dataclass(frozen=True, slots=True)
class Place:
    """A line of the script, or of a library that it calls."""

    file: str  # as it is to be shown
    line: int  # counted from 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One usage bug that was seen in a run."""

    rule: Rule  # which
    severity: Severity  # the rule's, or less where this case matters less
    what: str  # what was seen, with the numbers that led to the verdict
    where: Place | None  # the line that did it; ``None`` where no line of the script is to blame
    # The numbers in ``what``, by name.
    numbers: dict[str, Any] = field(default_factory=dict[str, Any])
    do: str = ""  # what to change in this case; empty where it is all that the rule says

    @property
    def advice(self) -> str:
        """What to change."""
        return self.do or self.rule.do

    def to_json(self) -> dict[str, Any]:
        """Return it as plain data."""
        return {
            "rule": self.rule.id,
            "severity": self.severity.value,
            "title": self.rule.title,
            "what": self.what,
            "file": None if self.where is None else self.where.file,
            "line": None if self.where is None else self.where.line,
            "numbers": self.numbers,
            "do": self.advice,
        }


_BELOW = ("torch", "preamp", "apex")  # packages whose frames stand below the script's own calls

_LIBRARIES = tuple(
    os.path.join(path, "") for path in {sysconfig.get_path(n) for n in ("stdlib", "purelib")}
)


def current_place() -> Place | None:
    """The innermost line on the stack, the script's own rather than a library's, or ``None``."""
    nearest: Place | None = None
    for place, is_library in _places():
        if not is_library:
            return place
        nearest = nearest or place
    return nearest


def current_places() -> tuple[Place, ...]:
    """The script's own lines on the stack, the innermost first."""
    return tuple(place for place, is_library in _places() if not is_library)


def _places() -> Iterator[tuple[Place, bool]]:
    for frame in frames():
        code = frame.f_code
        if not code.co_filename.startswith("<") and not _is_below(frame):
            yield _shown(code, frame.f_lineno), code.co_filename.startswith(_LIBRARIES)


def frames() -> Iterator[FrameType]:
    """The stack, from the innermost frame on."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_below(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    package = name.partition(".")[0]
    # The standard library is no place to look for a bug, except that it may hold a script.
    return package in _BELOW or (package in sys.stdlib_module_names and name != "__main__")


def _shown(code: CodeType, line: int) -> Place:
    """The place with its file relative to the working directory where it lies inside."""
    file = os.path.abspath(code.co_filename)
    is_near = os.path.splitdrive(file)[0] == os.path.splitdrive(os.getcwd())[0]
    relative = os.path.relpath(file) if is_near else file
    return Place(file if relative.startswith("..") else relative, line)
