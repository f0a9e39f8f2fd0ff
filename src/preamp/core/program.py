# SPDX-License-Identifier: BSD-3-Clause
"""Which line of the user's program is running."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from types import FrameType

_LIBRARIES = ("torch", "preamp")

Line = tuple[str, int]
"""Path of a file, and the number of a line, from 1."""


def line_of_program(frame: FrameType | None) -> Line | None:
    """The innermost line that is neither torch's nor preamp's, from ``frame`` outwards."""
    while frame is not None:
        if _is_of_program(frame):
            return frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
    return None


Call = tuple[str, int, str]
"""Path of a file, number of a line, and the name of the function that it is in."""


def calls_of_program(frame: FrameType | None, until: int = 0) -> tuple[Call, ...]:
    """All such lines from ``frame`` outwards, the innermost first, up to a frame by its ``id``."""
    found: list[Call] = []
    while frame is not None and id(frame) != until:
        if _is_of_program(frame):
            code = frame.f_code
            found.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    return tuple(found)


_STDLIB = os.path.join(os.path.dirname(os.__file__), "")
_INSTALLED = ("site-packages", "dist-packages")


def stack_of(calls: Sequence[Call]) -> list[str]:
    """As ``"file.py:12, in forward"``, without Python itself and what has started the program."""
    own = [call for call in calls if not _is_pythons(call[0])]
    outer = len(own)
    while outer and any(folder in own[outer - 1][0] for folder in _INSTALLED):
        outer -= 1
    own = own[: outer or None]  # all of it where the program itself is installed
    return [f"{shown((path, line))}, in {name}" for path, line, name in own]


def _is_pythons(path: str) -> bool:
    is_installed = any(folder in path for folder in _INSTALLED)
    return path.startswith("<frozen ") or (path.startswith(_STDLIB) and not is_installed)


def _is_of_program(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _LIBRARIES


def shown(line: Line | None) -> str:
    """As ``"file.py:12"``, relative to the working directory or the import path where it can be."""
    if line is None:
        return "unknown"
    path, number = line
    for folder in (os.getcwd(), *sys.path):
        if folder and path.startswith(os.path.join(folder, "")):
            return f"{os.path.relpath(path, folder)}:{number}"
    return f"{path}:{number}"
