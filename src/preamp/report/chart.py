# SPDX-License-Identifier: BSD-3-Clause
"""Lines over an axis of steps or of seconds, drawn to any width."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from preamp.report.svg import (
    Html,
    coordinate,
    joined,
    legend_of,
    percent,
    picture,
    sample,
    stretched,
    tag,
)

_LARGEST = 2.0**1000  # beyond it lies the end of every scale, so that no range or tick overflows


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """A range of values spread evenly over a length of 1, maybe after a logarithm."""

    low: float  # value at 0
    high: float  # value at 1; above ``low``
    ticks: tuple[tuple[float, str], ...]  # values to name, with their names
    # What is spread evenly, increasing: ``math.log2`` for a logarithmic scale.
    transform: Callable[[float], float] = float

    def place(self, value: float) -> float:
        """Return where ``value`` lies, between 0 and 1; what is outside lies at the end."""
        low, high = self.transform(self.low), self.transform(self.high)
        return min(max((self.transform(value) - low) / (high - low), 0.0), 1.0)


def linear(low: float, high: float, spell: Callable[[float], str], count: int = 5) -> Scale:
    """Spread ``low`` to ``high``; a range of no width is made wider."""
    low, high = max(low, -_LARGEST), min(high, _LARGEST)
    if not high > low:
        pad = abs(low) / 2 or 0.5
        low, high = low - pad, high + pad
    step = tick_step(high - low, count)
    values = multiples(low, high, step)
    return Scale(low=low, high=high, ticks=tuple((v, spell(v)) for v in values))


def powers_of_two(low: float, high: float, spell: Callable[[int], str], count: int = 5) -> Scale:
    """Spread positive values by their logarithm, with whole powers of two at the ends."""
    low, high = _positive(low), _positive(high)
    first, last = math.floor(math.log2(low)), math.ceil(math.log2(high))
    if first == last:
        first, last = first - 1, last + 1
    step = max(1, math.ceil((last - first) / count))
    ticks = tuple((2.0**e, spell(e)) for e in range(first, last + 1) if e % step == 0)
    return Scale(low=2.0**first, high=2.0**last, ticks=ticks, transform=math.log2)


def decades(low: float, high: float, spell: Callable[[float], str]) -> Scale:
    """Spread positive values by their logarithm, with 1, 2 and 5 times powers of ten as ticks."""
    low, high = _positive(low), _positive(high)
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = (1, 2, 5) if len(exponents) <= 3 else (1,)
    step = max(1, math.ceil(len(exponents) / 6))
    values = [f * 10.0**e for e in exponents if e % step == 0 for f in factors]
    ticks = tuple((v, spell(v)) for v in values if low <= v <= high)
    return Scale(low=low, high=high, ticks=ticks, transform=math.log10)


def _positive(value: float) -> float:
    return min(max(value, 1 / _LARGEST), _LARGEST)


def tick_step(span: float, count: int) -> float:
    """The smallest 1, 2, 5 times a power of ten that cuts ``span`` into ``count`` parts at most."""
    base = 10.0 ** math.floor(math.log10(span / count))
    return next(f * base for f in (1, 2, 5, 10, 20) if span / (f * base) <= count)


def multiples(low: float, high: float, step: float) -> list[float]:
    """Return the multiples of ``step`` from ``low`` to ``high``, as exact as decimals go."""
    digits = max(0, -math.floor(math.log10(step)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(n * step, digits) for n in range(first, last + 1)]


def finite_range(values: Iterable[float]) -> tuple[float, float] | None:
    """Return the smallest and the largest finite value, or ``None`` if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    return (min(finite), max(finite)) if finite else None


COLUMNS = 720  # columns that a timeline is divided into: about the pixels of a wide one

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


def running_median(values: Sequence[float], reach: int) -> list[float]:
    """Replace each value by the median of itself and ``reach`` finite ones on either side.

    Fewer where there are fewer. A lone peak leaves no trace, and a jump stays at its step. Values
    that are not finite stay as they are.
    """
    finite = [value for value in values if math.isfinite(value)]
    window = sorted(finite[:reach])
    medians: list[float] = []
    for at in range(len(finite)):
        if at + reach < len(finite):
            insort(window, finite[at + reach])
        if at > reach:
            del window[bisect_left(window, finite[at - reach - 1])]
        medians.append(window[(len(window) - 1) // 2])
    rest = iter(medians)
    return [next(rest) if math.isfinite(value) else value for value in values]


STYLES = 8  # lines that differ in colour and dashes; further ones begin again
_BOX = 1000.0  # width of the box that lines are drawn in, before it is stretched
_RUG = 12.0  # height of a row of marks
_FOOT = 22.0  # height of the labels below


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line."""

    name: str = ""  # for the legend; empty keeps it out
    points: Sequence[Point]  # by increasing x
    style: int = 0  # colour and dashes, by number
    faint: bool = False  # whether it only stands behind another one
    steps: bool = False  # whether values hold until the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """A row of marks above the lines."""

    name: str  # in a word
    xs: Sequence[float]  # where they are
    kind: str  # CSS class of the marks


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What to draw."""

    name: str  # prefix of the ids, alone on the page
    title: str  # what it shows
    description: str  # what there is to see
    lines: Sequence[Line]  # in the order in which they are drawn
    x: Scale  # horizontal scale
    y: Scale  # vertical scale
    x_name: str  # what x is, in a word
    marks: Sequence[Marks] = ()  # rows above the lines; those without marks are left out
    height: float = 180.0  # of the lines' space, in CSS pixels


def draw(chart: Chart) -> Html:
    """Draw a chart as one ``<svg>`` element, and below it the names of its lines."""
    rows = [marks for marks in chart.marks if marks.xs]
    top = _RUG * len(rows) + 4
    bottom = top + chart.height
    drawn = picture(
        chart.name,
        chart.title,
        chart.description,
        *_y_labels(chart.y, top, bottom),
        *_x_labels(chart.x, chart.x_name, top, bottom),
        *(part for row, marks in enumerate(rows) for part in _rug(marks, chart.x, row)),
        stretched(
            *(_drawn(line, chart) for line in chart.lines), width=_BOX, height=chart.height, y=top
        ),
        height=bottom + _FOOT,
    )
    return joined([drawn, _legend((line.name, line.style) for line in chart.lines if line.name)])


def _legend(entries: Iterable[tuple[str, int]]) -> Html:
    """List names beside samples of their lines, below a chart."""
    return legend_of(
        (
            sample(tag("path", d="M1 6h30", class_=line_class(style)), width=32, height=12),
            tag("bdi", name),
        )
        for name, style in entries
    )


def line_class(style: int) -> str:
    """Return the CSS class of a style."""
    return f"line s{style % STYLES}"


def _y_labels(y: Scale, top: float, bottom: float) -> list[Html]:
    parts: list[Html] = []
    for value, label in y.ticks:
        height = bottom - y.place(value) * (bottom - top)
        parts.append(tag("line", x2="100%", y1=height, y2=height, class_="grid"))
        parts.append(tag("text", label, x=-8, y=height + 4, text_anchor="end"))
    return parts


def _x_labels(x: Scale, name: str, top: float, bottom: float) -> list[Html]:
    parts = [tag("line", x2="100%", y1=bottom, y2=bottom, class_="axis")]
    foot = bottom + 17
    parts.append(tag("text", name, x=-8, y=foot, text_anchor="end", class_="unit"))
    for value, label in x.ticks:
        place = x.place(value)
        at = percent(place)
        parts.append(tag("line", x1=at, x2=at, y1=bottom, y2=bottom + 4, class_="axis"))
        anchor = "start" if place < 0.01 else "end" if place > 0.97 else "middle"
        parts.append(tag("text", label, x=at, y=foot, text_anchor=anchor))
    return parts


def _rug(marks: Marks, x: Scale, row: int) -> list[Html]:
    """Draw one mark for each column that has any, so that none is ever left out."""
    y = _RUG * row
    width = _BOX / COLUMNS
    columns = columns_hit(marks.xs, x.low, x.high)
    path = "".join(f"M{coordinate((column + 0.5) * width)} 0v8" for column in columns)
    return [
        tag("text", marks.name, x=-8, y=y + 8, text_anchor="end", class_=f"unit {marks.kind}"),
        stretched(tag("path", d=path, class_=f"mark {marks.kind}"), width=_BOX, height=8, y=y),
    ]


def _drawn(line: Line, chart: Chart) -> Html:
    thinned = thin(line.points, chart.x.low, chart.x.high)
    path = joined(_path(part, chart, steps=line.steps) for part in thinned)
    faint = " faint" if line.faint else ""
    return tag("path", d=path, class_=line_class(line.style) + faint) if path else Html()


def _path(points: Sequence[Point], chart: Chart, *, steps: bool) -> Html:
    """Write one line's path; a single point becomes a dot, by its round ends."""
    places = [
        (coordinate(_BOX * chart.x.place(x)), coordinate(chart.height * (1 - chart.y.place(y))))
        for x, y in points
    ]
    (x, y), *rest = places
    if not rest:
        return Html(f"M{x} {y}h0")
    if steps:
        return Html(f"M{x} {y}" + "".join(f"H{x}V{y}" for x, y in rest))
    return Html(f"M{x} {y}L" + " ".join(f"{x} {y}" for x, y in rest))
