# SPDX-License-Identifier: BSD-3-Clause
"""The cast audit: what is cast, counted by function and by line of the program."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from preamp.casting import Cast, listen
from preamp.core.dtypes import dtype_name
from preamp.core.program import line_of_program, shown
from preamp.core.undo import UndoStack

if TYPE_CHECKING:
    from preamp.numerics import CastRecord

_Site = tuple[str, torch.dtype, torch.dtype, str]
"""Function, dtypes before and after, line of the program: casts counted together."""


@contextmanager
def audit_casts() -> Generator[list[CastRecord]]:
    """List what functions cast inside the block, for O1 and O4.

    Every engine's casts in the process are seen, on every thread. A weight counts in each call,
    also where autocast's cache held its cast; casts inside compiled code are not seen. Numbers are
    not changed; each cast costs a walk up the stack.

    Yields:
        A list that is filled when the block ends, most bytes first.
    """
    calls, elements = Counter[_Site](), Counter[_Site]()

    def count(made: Cast) -> None:
        where = shown(line_of_program(inspect.currentframe()))
        site = made.function, made.source, made.target, where
        calls[site] += 1
        elements[site] += made.elements

    records: list[CastRecord] = []
    listening = UndoStack()
    try:
        listen(count, listening)
        yield records
    finally:
        listening.unwind()
        records += _records(calls, elements)


def _records(calls: Counter[_Site], elements: Counter[_Site]) -> list[CastRecord]:
    """Most bytes first."""
    from preamp.numerics import CastRecord

    records = [
        CastRecord(
            function=function,
            source=dtype_name(source),
            target=dtype_name(target),
            calls=calls[site],
            bytes=elements[site] * (source.itemsize + target.itemsize),
            where=where,
        )
        for site in list(calls)  # other threads may be counting
        for function, source, target, where in [site]
    ]
    return sorted(records, key=lambda record: (-record.bytes, record.where, record.function))
