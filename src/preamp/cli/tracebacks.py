# SPDX-License-Identifier: BSD-3-Clause
"""Tracebacks of programs that a command runs: as without the command around them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType, TracebackType

_COMMANDS = ("preamp.cli.", "preamp.doctor.")


def begin_tracebacks(is_first: Callable[[FrameType], bool]) -> None:
    """Let the traceback of an uncaught exception begin at the first frame for which this holds.

    Where there is none, it stays whole; that of a syntax error, which names its place, is left
    out. Frames of preamp's commands further down are left out too, but for the last ones, which
    raised. Mutates ``sys.excepthook``.
    """
    show = sys.excepthook

    def show_part(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        trace = part_of(trace, is_first, error)
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_part


def part_of(
    trace: TracebackType | None, is_first: Callable[[FrameType], bool], error: BaseException
) -> TracebackType | None:
    """The part of a traceback that `begin_tracebacks` shows."""
    parts: list[TracebackType] = []
    part = trace
    while part is not None:
        if parts or is_first(part.tb_frame):
            parts.append(part)
        part = part.tb_next
    if not parts:
        return None if isinstance(error, SyntaxError) else trace
    shown: TracebackType | None = None
    for part in reversed(parts):
        if shown is None or not _name(part.tb_frame).startswith(_COMMANDS):
            shown = TracebackType(shown, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return shown


def _name(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}."
