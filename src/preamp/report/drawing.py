# SPDX-License-Identifier: BSD-3-Clause
"""Loss scales, skips and exponents, drawn by matplotlib as SVG that is part of the page."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Final

from preamp.core.errors import unavailable
from preamp.core.extras import how_to_install
from preamp.numerics import FORMATS, TensorStatistics
from preamp.report import words
from preamp.report.gather import Point, Run
from preamp.report.html import Html, tag

COLUMNS: Final = 720  # that steps are thinned to: about the pixels of a wide picture
_WIDTH = 7.4  # inches, of 72 units of the picture each
_NAMED_STEPS = 12  # skipped steps that a description names one by one

_COLOURS: Final = {  # as matplotlib writes them, by the variables of the style that replace them
    "quiet": "#010204",
    "line": "#010205",
    "warning": "#010206",
    "raised": "#010207",
}
Spell = Callable[[float, int], str]  # of a value beside an axis, and its place among others
_STYLES = ("-", "--", ":", "-.")


def scale_picture(run: Run, name: str) -> Html:
    """Draw a run's loss scales by step, as powers of two, and the steps that were skipped.

    ``name`` begins the ids. Each skipped step is in a mark.
    """
    rows = run.scales()
    figure, axes = _axes(2.1, "step", _step, _power)
    for index, (loss_id, points) in enumerate(rows.items()):
        kept = thin([(step, math.log2(scale)) for step, scale in points])
        style = {"linestyle": _STYLES[index % len(_STYLES)], "color": _COLOURS["line"]}
        axes.plot(
            *zip(*kept, strict=True), drawstyle="steps-post", label=f"loss {loss_id}", **style
        )
    skipped = thin([(step.step, 1.06) for step in run.skipped])
    if skipped:
        top, colour = axes.get_xaxis_transform(), _COLOURS["warning"]
        look = {"marker": "|", "linestyle": "none", "color": colour, "clip_on": False}
        axes.plot(*zip(*skipped, strict=True), transform=top, **look)
        axes.text(1.0, 1.15, "skipped", transform=axes.transAxes, ha="right", color=colour)
    if len(rows) > 1:
        axes.legend(frameon=False, labelcolor=_COLOURS["quiet"])
    told = [_describe_scale(loss_id, points) for loss_id, points in rows.items()]
    return _svg(figure, name, "Loss scale by step", " ".join([*told, describe_skips(run)]))


def exponents_picture(tensor: TensorStatistics, name: str) -> Html:
    """Draw how many values of a tensor have which power of two, and what its format holds."""
    figure, axes = _axes(1.4, "power of two", _power, _percent)
    counts, form = tensor.histogram or {}, FORMATS[tensor.form]
    total = sum(counts.values()) or 1
    axes.bar(list(counts), [100 * n / total for n in counts.values()], color=_COLOURS["line"])
    axes.axvspan(
        form.min_exponent - 0.5, form.max_exponent + 0.5, color=_COLOURS["raised"], zorder=0
    )
    for edge in (form.subnormal_exponent - 0.5, form.max_exponent + 0.5):
        axes.axvline(edge, color=_COLOURS["warning"], linestyle="--", linewidth=1)
    low, high = min(counts, default=0), max(counts, default=0)
    told = (
        f"Values lie between {words.power(low)} and {words.power(high + 1)}; {tensor.form} holds"
        f" {words.power(form.subnormal_exponent)} to {words.power(form.max_exponent + 1)}."
    )
    return _svg(figure, name, "Values by power of two", told)


def thin(points: Sequence[Point]) -> list[Point]:
    """Keep the lowest and the highest point of each of `COLUMNS`, by increasing step."""
    if not points:
        return []
    first, last = min(points)[0], max(points)[0]
    width = max(1, last - first)
    found: dict[int, list[Point]] = {}
    for point in sorted(points):
        found.setdefault(int((point[0] - first) * (COLUMNS - 1) / width), []).append(point)
    ends = ({min(column, key=_y), max(column, key=_y)} for column in found.values())
    return [point for both in ends for point in sorted(both)]


def _y(point: Point) -> float:
    return point[1]


def describe_skips(run: Run) -> str:
    """Say which steps were skipped."""
    if not run.skipped:
        return "No step was skipped."
    rows = [([s.step for s in steps if s.skipped], whose) for steps, whose in run.by_optimizer()]
    return " ".join(_skipped(numbers, whose) for numbers, whose in rows if numbers)


def _skipped(steps: Sequence[int], whose: str) -> str:
    if len(steps) > _NAMED_STEPS:
        return f"{len(steps):,} steps{whose} were skipped, from {steps[0]:,} to {steps[-1]:,}."
    numbers = ", ".join(f"{step:,}" for step in steps)
    return f"Skipped: {'step' if len(steps) == 1 else 'steps'} {numbers}{whose}."


def _describe_scale(loss_id: str, points: Sequence[Point]) -> str:
    values = [y for _, y in points]
    return (
        f"The loss scale of loss {loss_id} starts at {words.scale(values[0])}, ends at"
        f" {words.scale(values[-1])}, and lies between {words.scale(min(values))} and"
        f" {words.scale(max(values))}."
    )


def _axes(height: float, x_name: str, spell_x: Spell, spell_y: Spell) -> tuple[Any, Any]:
    """An empty picture; raises `PreampUnavailableError` where matplotlib is missing."""
    # Late, because the library is imported without matplotlib and must not need it.
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise unavailable(
            "Cannot import matplotlib",
            "A report's pictures are drawn with it; the rest of the library does not need it",
            how_to_install("report"),
        ) from None
    figure: Any = Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(_COLOURS["quiet"])
    axes.tick_params(color=_COLOURS["quiet"], labelcolor=_COLOURS["quiet"])
    axes.set_xlabel(x_name, color=_COLOURS["quiet"])
    for axis, spell in ((axes.xaxis, spell_x), (axes.yaxis, spell_y)):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True))
        axis.set_major_formatter(spell)
    return figure, axes


def _step(value: float, _place: int) -> str:
    return f"{value:,.0f}"


def _power(value: float, _place: int) -> str:
    return words.power(int(value))


def _percent(value: float, _place: int) -> str:
    return f"{value:g} %"


def _svg(figure: Any, name: str, title: str, description: str) -> Html:
    """Write a picture as an element of the page, in the colours of its style.

    ``description`` is what there is to see in it, for those who do not see it.
    """
    from matplotlib import rc_context  # pyright: ignore[reportUnknownVariableType]

    written = io.StringIO()
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "preamp", "font.size": 9}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(written, format="svg", transparent=True, metadata=nothing)
    drawn = written.getvalue().partition("<svg ")[2].partition(">")[2].rpartition("</svg>")[0]
    drawn = re.sub(r"<defs>\s*<style.*?</defs>", "", drawn, count=1, flags=re.DOTALL)
    drawn = re.sub(r'( id="|href="#|url\(#)', rf"\g<1>{name}-", drawn.replace("xlink:", ""))
    for variable, colour in _COLOURS.items():
        drawn = drawn.replace(colour, f"var(--{variable})")
    width, height = (72 * inches for inches in figure.get_size_inches())
    return tag(
        "svg",
        tag("title", title, id=f"{name}-title"),
        tag("desc", description, id=f"{name}-desc"),
        Html(drawn),
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        viewBox=f"0 0 {width:g} {height:g}",
    )
