# SPDX-License-Identifier: BSD-3-Clause
"""Bytes by category as stacked bars."""

from __future__ import annotations

from collections.abc import Sequence

from preamp.report import words
from preamp.report.blocks import Figure, Missing, Section, Table, columns
from preamp.report.gather import Run
from preamp.report.svg import Html, joined, legend_of, percent, picture, sample, tag

ORDER = ("weights", "masters", "gradients", "optimizer state", "buffers")
"""Categories from left to right; others follow."""

_ROW = 38.0
_BAR = 18.0
_STYLES = 6


def categories_of(runs: Sequence[Run]) -> list[str]:
    """Return all categories that any run has bytes in, in their order."""
    found = {
        name for run in runs if run.memory for name, n in run.memory.categories.items() if n > 0
    }
    known = [name for name in ORDER if name in found]
    return known + sorted(found.difference(ORDER))


def bars(runs: Sequence[Run], name: str) -> Html | None:
    """Draw a bar for each run that counted its bytes; ``name`` is the prefix of ids."""
    rows = [(run, run.memory.categories) for run in runs if run.memory]
    categories = categories_of(runs)
    if not categories:
        return None
    largest = max(sum(counts.values()) for _, counts in rows)
    parts = [
        part
        for row, (run, counts) in enumerate(rows)
        for part in _bar(words.shown(run.name, 24), counts, categories, largest, _ROW * row)
    ]
    totals = (
        f"{words.shown(run.name)} {words.size(sum(counts.values()))}".strip()
        + f" ({_parts(counts, categories)})"
        for run, counts in rows
    )
    drawn = picture(
        name,
        "Memory by category",
        "; ".join(totals) + ".",
        *parts,
        height=_ROW * len(rows),
        class_="plot full",
    )
    return joined([drawn, legend(categories)])


def legend(categories: Sequence[str]) -> Html:
    """List the categories beside samples of their fill."""
    return legend_of(
        (sample(*_fill("0", "20", 0, 10, style)), tag("bdi", words.shown(category, 32)))
        for style, category in enumerate(categories)
    )


def _parts(counts: dict[str, int], categories: Sequence[str]) -> str:
    return ", ".join(
        f"{words.shown(c, 32)} {words.size(counts[c])}" for c in categories if counts.get(c)
    )


def _bar(
    name: str, counts: dict[str, int], categories: Sequence[str], largest: int, y: float
) -> list[Html]:
    total = sum(counts.values())
    label = f"{name}  {words.size(total)}".strip()
    drawn = [tag("text", label, x=0, y=y + 12, class_="value")]
    left = 0
    for style, category in enumerate(categories):
        width = counts.get(category, 0)
        if width > 0:
            drawn += _fill(percent(left / largest), percent(width / largest), y + 17, _BAR, style)
        left += width
    return drawn


def _fill(x: str, width: str, y: float, height: float, style: int) -> list[Html]:
    """A rectangle of one category: its colour, and over it its pattern."""
    kind = style % _STYLES
    place = {"x": x, "y": f"{y:.0f}", "width": width, "height": f"{height:.0f}"}
    return [
        tag("rect", **place, class_=f"m{kind}"),
        tag("rect", **place, fill=f"url(#pattern-{kind})", class_="seam"),
    ]


def patterns() -> Html:
    """Define the patterns once for a page: one for each style, and one for subnormal ranges."""
    paths = ("", "M0 8L8 0", "M0 0L8 8", "M0 4H8", "M4 0V8", "M0 8L8 0M0 0L8 8")
    styles = (_pattern(str(kind), path, "hatch") for kind, path in enumerate(paths))
    return tag("defs", *styles, _pattern("sub", "M0 8L8 0M0 4L4 0M4 8L8 4", "hatch dark"))


def _pattern(name: str, path: str, style: str) -> Html:
    return tag(
        "pattern",
        tag("path", d=path, class_=style),
        id=f"pattern-{name}",
        width=8,
        height=8,
        patternUnits="userSpaceOnUse",
    )


def memory_section(runs: list[Run], prefix: str) -> Section:
    """Make the part about memory, of one run or of several; ``prefix`` is of all ids."""
    drawn = bars(runs, f"{prefix}-bars")
    if drawn is None:
        missing = Missing(
            what="Bytes were not counted",
            do='Pass `numerics="light"` to `preamp.initialize`, and take two steps or more',
        )
        return Section(name=prefix, title="Memory", blocks=[missing])
    categories = categories_of(runs)
    numbers = (*(words.shown(category, 32) for category in categories), "all")
    table = Table(
        name=f"{prefix}-table",
        caption="Bytes by category",
        summary="The same as a table",
        columns=columns("run" if len(runs) > 1 else "", *numbers, numbers=numbers),
        rows=[
            [words.shown(run.name) or "bytes", *_bytes(run.memory.categories, categories)]
            for run in runs
            if run.memory
        ],
    )
    figure = Figure(title="Bytes held, by category", body=drawn)
    return Section(name=prefix, title="Memory", blocks=[figure, table])


def _bytes(counts: dict[str, int], categories: list[str]) -> list[str]:
    return [*(f"{counts.get(c, 0):,}" for c in categories), f"{sum(counts.values()):,}"]
