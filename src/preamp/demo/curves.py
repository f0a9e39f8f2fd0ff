# SPDX-License-Identifier: BSD-3-Clause
"""Figures of a run as SVG text that can stand inside an HTML page."""

# matplotlib leaves its keyword arguments untyped.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from preamp.demo.records import DemoResult, LevelResult

_INK = "#010203"
"""Stands for the page's text colour until the SVG is written; then it becomes currentColor."""

_STYLES = {
    "O0": ("#7f7f7f", "solid"),
    "O1": ("#d9730d", "solid"),
    "O2": ("#c43b3b", "dashed"),
    "O3": ("#9b51e0", "dotted"),
    "O4": ("#2f80ed", "solid"),
    "O5": ("#1f9e89", "dashed"),
}
"""Colour and line of each level; readable on white and on black, and told apart without colour."""

_CATEGORIES = (
    ("weights", "#2f80ed", ""),
    ("masters", "#1f9e89", "//"),
    ("gradients", "#d9730d", ".."),
    ("optimizer_state", "#7f7f7f", "xx"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One figure.

    Attributes:
        name: Prefix of the ids in the SVG.
        title: What it shows.
        description: The same for those who do not see it.
        svg: An ``<svg>`` element with a title and a description.
    """

    name: str
    title: str
    description: str
    svg: str


def pictures_of(result: DemoResult) -> tuple[Picture, ...]:
    """Draw a run.

    Args:
        result: The run.

    Returns:
        Loss by step, loss by time, memory by category.
    """
    rows = [row for row in result.levels if row.losses]
    return (
        _picture(
            "loss-by-step",
            "Training loss by step",
            f"{_list(rows)}. Lines that lie on each other train equally well.",
            lambda axes: _draw_losses(axes, rows, _steps, "step"),
        ),
        _picture(
            "loss-by-time",
            "Training loss by time",
            f"{_list(rows)}. A line further to the left got there faster.",
            lambda axes: _draw_losses(axes, rows, _elapsed, "seconds of training"),
        ),
        _picture(
            "memory",
            "Bytes per parameter",
            "Weights, masters, gradients and optimizer state, stacked for each level. "
            + _list_memory(rows),
            lambda axes: _draw_memory(axes, rows),
        ),
    )


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Average each value with the ones before it.

    Args:
        values: Losses; those that are not finite stay as they are.
        window: How many to average.

    Returns:
        As many values.
    """
    averaged: list[float] = []
    for end in range(1, len(values) + 1):
        part = values[max(0, end - window) : end]
        averaged.append(sum(part) / len(part))
    return averaged


def _picture(name: str, title: str, description: str, draw: Callable[[Axes], None]) -> Picture:
    look: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 11}
    buffer = io.StringIO()
    look |= dict.fromkeys(_INKED, _INK)
    with mpl.rc_context(look):
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        figure.savefig(buffer, format="svg", transparent=True)
    svg = _embed(buffer.getvalue(), name, title, description)
    return Picture(name=name, title=title, description=description, svg=svg)


_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def _embed(document: str, name: str, title: str, description: str) -> str:
    """Make an SVG document an element: no prolog, no addresses, unique ids, inherited ink."""
    body = document[document.index("<svg") :]
    # A style element in an inline SVG would apply to the whole page.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body, flags=re.DOTALL)
    body = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", body)
    body = body.replace("xlink:href=", "href=")
    body = re.sub(r'\bid="', f'id="{name}-', body)
    body = body.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    body = body.replace(_INK, "currentColor")
    body = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px sans-serif", body)
    label = f'role="img" aria-labelledby="{name}-title {name}-desc"'
    head = (
        f'<title id="{name}-title">{escape(title)}</title>'
        f'<desc id="{name}-desc">{escape(description)}</desc>'
    )
    return re.sub(
        r"<svg\b([^>]*)>", lambda found: f"<svg {label}{found[1]}>{head}", body, count=1
    ).strip()


def _draw_losses(
    axes: Axes,
    rows: Sequence[LevelResult],
    places: Callable[[LevelResult], list[float]],
    label: str,
) -> None:
    for row in rows:
        colour, line = _STYLES.get(row.level, (_INK, "dashdot"))
        losses = smooth(row.losses, window=max(1, len(row.losses) // 20))
        axes.plot(places(row), losses, color=colour, linestyle=line, label=row.level)
    axes.set_xlabel(label)
    axes.set_ylabel("bits per byte (running mean)")
    if rows:
        axes.legend(frameon=False, ncols=2)


def _steps(row: LevelResult) -> list[float]:
    return [float(step) for step in range(1, len(row.losses) + 1)]


def _elapsed(row: LevelResult) -> list[float]:
    return list(accumulate(row.step_seconds))


def _draw_memory(axes: Axes, rows: Sequence[LevelResult]) -> None:
    counted = [(row.level, row.memory) for row in rows if row.memory is not None]
    levels = [level for level, _ in counted]
    left = [0.0] * len(counted)
    for category, colour, hatch in _CATEGORIES:
        widths = [float(getattr(memory, category)) for _, memory in counted]
        label = category.replace("_", " ")
        axes.barh(levels, widths, left=left, color=colour, hatch=hatch, label=label)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("bytes per parameter")
    if counted:
        axes.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _list(rows: Sequence[LevelResult]) -> str:
    ends = (f"{row.level} ends at {_last(row)} after {len(row.losses)} steps" for row in rows)
    return "; ".join(ends) or "No step was done"


def _last(row: LevelResult) -> str:
    loss = smooth(row.losses, window=max(1, len(row.losses) // 20))[-1]
    return f"{loss:.2f}" if math.isfinite(loss) else "no finite value"


def _list_memory(rows: Sequence[LevelResult]) -> str:
    totals = (f"{row.level}: {row.memory.total:.1f}" for row in rows if row.memory is not None)
    return "; ".join(totals) or "None was counted"
