# SPDX-License-Identifier: BSD-3-Clause
"""Which line of the script is being executed."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator
from types import CodeType, FrameType

from preamp.doctor.rule import Place

_BELOW = ("torch", "preamp", "apex")
"""Packages whose frames stand below the script's own calls."""

_LIBRARIES = tuple(
    os.path.join(path, "") for path in {sysconfig.get_path(n) for n in ("stdlib", "purelib")}
)


def current_place() -> Place | None:
    """The innermost line of the script on the calling thread's stack, or ``None``.

    Where the script lets a library train, the script's own line is preferred to the library's.
    """
    nearest: Place | None = None
    for frame in _frames():
        code = frame.f_code
        if code.co_filename.startswith("<") or _is_below(frame):
            continue
        place = _shown(code, frame.f_lineno)
        if not code.co_filename.startswith(_LIBRARIES):
            return place
        nearest = nearest or place
    return nearest


def _frames() -> Iterator[FrameType]:
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
    relative = os.path.relpath(file) if os.path.splitdrive(file)[0] == _drive() else file
    return Place(file if relative.startswith("..") else relative, line)


def _drive() -> str:
    return os.path.splitdrive(os.getcwd())[0]
