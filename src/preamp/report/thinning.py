# SPDX-License-Identifier: BSD-3-Clause
"""Long rows of values as few points, with everything kept that a reader could see."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

COLUMNS = 720
"""Columns that a timeline is divided into: about the pixels of a wide one."""

Point = tuple[float, float]


def column_of(x: float, first: float, last: float, columns: int = COLUMNS) -> int:
    """The one of ``columns`` between ``first`` and ``last`` that ``x`` falls into."""
    if last <= first:
        return 0
    return min(max(int((x - first) / (last - first) * columns), 0), columns - 1)


def thin(
    points: Sequence[Point], first: float, last: float, columns: int = COLUMNS
) -> list[list[Point]]:
    """Keep the lowest and the highest point of each of ``columns`` between ``first`` and ``last``.

    Points are by increasing x; y may be infinite or nan. Returns lines of points, at most two in a
    column. A line ends where a column has nothing but values that are not finite.
    """
    lines: list[list[Point]] = [[]]
    column, inside = -1, list[Point]()
    for point in points:
        here = column_of(point[0], first, last, columns)
        if here != column:
            _close(lines, inside)
            column, inside = here, []
        inside.append(point)
    _close(lines, inside)
    return [line for line in lines if line]


def _close(lines: list[list[Point]], inside: Sequence[Point]) -> None:
    """Add what a column has to the last line, or begin a new one."""
    finite = [point for point in inside if math.isfinite(point[1])]
    if finite:
        ends = {min(finite, key=_y), max(finite, key=_y)}
        lines[-1] += sorted(ends)
    elif inside:
        lines.append([])


def _y(point: Point) -> float:
    return point[1]


def columns_hit(
    xs: Iterable[float], first: float, last: float, columns: int = COLUMNS
) -> list[int]:
    """Return the columns with at least one of ``xs``, from left to right."""
    return sorted({column_of(x, first, last, columns) for x in xs})


def smooth(values: Sequence[float], window: float) -> list[float]:
    """Average each value with the ones before it, the nearer ones counting more.

    A value ``window`` back counts 1/e of the latest one. Values that are not finite stay as they
    are and count for nothing.
    """
    fade = math.exp(-1 / max(window, 1e-9))
    averaged: list[float] = []
    mean, weight = 0.0, 0.0
    for value in values:
        if math.isfinite(value):
            weight = fade * weight + 1
            mean += (value - mean) / weight
        averaged.append(mean if math.isfinite(value) else value)
    return averaged
