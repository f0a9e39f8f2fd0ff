# SPDX-License-Identifier: BSD-3-Clause
"""Rows of a heat map as strips of five shades, with the numbers beside them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from preamp.report import words
from preamp.report.layers import HeatMap, Layer
from preamp.report.svg import Html, picture, stretched, tag

SHADES: tuple[tuple[float, str], ...] = (
    (0.0, "none"),
    (0.01, "below 1 %"),
    (0.05, "1 to 5 %"),
    (0.2, "5 to 20 %"),
    (0.5, "20 to 50 %"),
    (float("inf"), "50 % or more"),
)
"""Upper end of each shade, left out itself, and its name. The first one is exactly nothing."""

_HEIGHT = 18.0


def shade_of(share: float) -> int:
    """Return the shade of a share, by number."""
    if share <= 0:
        return 0
    return next(i for i, (end, _) in enumerate(SHADES) if share < end)


def strip(layer: Layer, heat: HeatMap, name: str) -> Html:
    """Draw one row."""
    title = f"Underflow in {words.shown(layer.name)}"
    steps = f"From step {heat.first:,} to step {heat.last:,}"
    description = f"{steps} no gradient was finite."
    if not math.isnan(layer.worst):
        description = (
            f"{steps}; at most {words.share(layer.worst)}, at step {layer.worst_step:,}; at the"
            f" end {words.share(layer.latest.share)}."
        )
    return _strip(layer.cells, name, title, description)


def legend() -> Html:
    """List the shades."""
    items = [
        tag("li", tag("span", class_=f"swatch h{i}", aria_hidden="true"), name)
        for i, (_, name) in enumerate(SHADES)
    ]
    return tag("ul", *items, class_="legend")


def _strip(cells: Sequence[float | None], name: str, title: str, description: str) -> Html:
    parts: list[Html] = []
    left = 0
    for shade, group in groupby(cells, lambda cell: None if cell is None else shade_of(cell)):
        width = len(list(group))
        if shade is not None:
            parts.append(tag("rect", x=left, width=width, height=_HEIGHT, class_=f"h{shade}"))
        left += width
    box = stretched(*parts, width=len(cells), height=_HEIGHT)
    return picture(name, title, description, box, height=_HEIGHT, class_="strip")


def axis(heat: HeatMap) -> str:
    """Say what the ends of the strips are."""
    if heat.first == heat.last:
        return f"step {heat.first:,}"
    return f"step {heat.first:,} → {heat.last:,}"


def numbers(layer: Layer) -> tuple[str, ...]:
    """Write a row's numbers: worst share, its step, latest share, lost altogether, zeros."""
    return (
        words.share(layer.worst),
        f"{layer.worst_step:,}",
        words.share(layer.latest.share),
        words.share(layer.latest.lost),
        words.share(layer.latest.zeros),
    )
