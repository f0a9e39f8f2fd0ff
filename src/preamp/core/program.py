# SPDX-License-Identifier: BSD-3-Clause
"""Which line of the user's program is running."""

from __future__ import annotations

import os
import sys
import traceback
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


def line_of_error(error: BaseException) -> Line | None:
    """The innermost such line that an error came through on the way to where it was caught."""
    found = None
    for frame, number in traceback.walk_tb(error.__traceback__):
        if _is_of_program(frame):
            found = frame.f_code.co_filename, number
    return found


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
