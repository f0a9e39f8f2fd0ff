# SPDX-License-Identifier: BSD-3-Clause
"""Which line of the user's program is running."""

from __future__ import annotations

import itertools
import linecache
import os
import sys
import traceback
from collections.abc import Sequence
from types import FrameType, TracebackType

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


def line_of_error(error: BaseException) -> Line | None:
    """The innermost such line that an error came through on the way to where it was caught."""
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if _is_of_program(frame):
            found = frame.f_code.co_filename, number
    return found


def call_of_error(error: BaseException) -> str:
    """What is called in that line, such as ``"torch.fft.rfft"``.

    The whole line where it is no call, or before Python 3.11, and nothing without the source.
    """
    found = None
    trace = error.__traceback__
    while trace is not None:
        found = trace if _is_of_program(trace.tb_frame) else found
        trace = trace.tb_next
    return "" if found is None else _expression(found)


def _expression(trace: TracebackType) -> str:
    code = trace.tb_frame.f_code
    line = linecache.getline(code.co_filename, trace.tb_lineno, trace.tb_frame.f_globals)
    positions = getattr(code, "co_positions", None)
    places = () if positions is None else positions()
    place = next(itertools.islice(places, trace.tb_lasti // 2, None), None)
    if place is None or place[0] != place[1] or place[2] is None:
        return line.strip()
    shown = line.encode()[place[2] : place[3]].decode()
    depth = 0
    for index in reversed(range(len(shown) if shown.endswith(")") else 0)):
        depth += (shown[index] == ")") - (shown[index] == "(")
        if depth == 0:  # the bracket that opens the last one's arguments
            return shown[:index] or shown
    return shown


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
