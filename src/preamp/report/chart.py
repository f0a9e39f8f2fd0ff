# SPDX-License-Identifier: BSD-3-Clause
"""Lines over an axis of steps or of seconds, drawn to any width."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preamp.report.scales import Scale
from preamp.report.svg import Html, coordinate, joined, percent, picture, stretched, tag
from preamp.report.thinning import COLUMNS, Point, columns_hit, thin

STYLES = 8
"""Lines that differ in colour and dashes; further ones begin again."""

_BOX = 1000.0  # width of the box that lines are drawn in, before it is stretched
_RUG = 12.0  # height of a row of marks
_FOOT = 22.0  # height of the labels below


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line.

    Attributes:
        name: For the legend; empty keeps it out.
        points: By increasing x.
        style: Colour and dashes, by number.
        faint: Whether it only stands behind another one.
        steps: Whether values hold until the next one.
    """

    name: str = ""
    points: Sequence[Point]
    style: int = 0
    faint: bool = False
    steps: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """A row of marks above the lines.

    Attributes:
        name: In a word.
        xs: Where they are.
        kind: CSS class of the marks.
    """

    name: str
    xs: Sequence[float]
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What to draw.

    Attributes:
        name: Prefix of the ids, alone on the page.
        title: What it shows.
        description: What there is to see.
        lines: In the order in which they are drawn.
        x: Horizontal scale.
        y: Vertical scale.
        x_name: What x is, in a word.
        marks: Rows above the lines; those without marks are left out.
        height: Of the lines' space, in CSS pixels.
    """

    name: str
    title: str
    description: str
    lines: Sequence[Line]
    x: Scale
    y: Scale
    x_name: str
    marks: Sequence[Marks] = ()
    height: float = 180.0


def draw(chart: Chart) -> Html:
    """Draw a chart as one ``<svg>`` element."""
    rows = [marks for marks in chart.marks if marks.xs]
    top = _RUG * len(rows) + 4
    bottom = top + chart.height
    return picture(
        chart.name,
        chart.title,
        chart.description,
        *_y_labels(chart.y, top, bottom),
        *_x_labels(chart.x, chart.x_name, top, bottom),
        *(part for row, marks in enumerate(rows) for part in _rug(marks, chart.x, row)),
        stretched(
            *(_drawn(line, chart) for line in chart.lines),
            width=_BOX,
            height=chart.height,
            y=top,
        ),
        height=bottom + _FOOT,
    )


def legend(entries: Iterable[tuple[str, int]]) -> Html:
    """List names beside samples of their lines, below a chart."""
    items = [tag("li", _sample(style), tag("bdi", name)) for name, style in entries]
    return tag("ul", *items, class_="legend") if items else Html()


def line_class(style: int) -> str:
    """Return the CSS class of a style."""
    return f"line s{style % STYLES}"


def _sample(style: int) -> Html:
    path = tag("path", d="M1 6h30", class_=line_class(style))
    return tag("svg", path, width=32, height=12, aria_hidden="true")


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
