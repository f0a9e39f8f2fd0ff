# SPDX-License-Identifier: BSD-3-Clause
"""Figures of ``docs/benchmarks.md`` as SVG documents, readable on light and on dark pages."""

from __future__ import annotations

import io
import re

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from preamp_bench.records import Record

_INK = "#010203"
"""Stands for the page's text colour until the SVG is written; then it becomes currentColor."""

_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
_STYLE = "<style>svg{color:#222}@media(prefers-color-scheme:dark){svg{color:#ddd}}</style>"

# Colour, line and marker: told apart without colour, and without reading the legend ours are red.
_LOOKS = (
    ("FusedAdam", "#d1495b", "-", "o"),
    ("preamp O", "#d1495b", "--", "s"),
    ("preamp ops", "#d1495b", ":", "^"),
    ("GradScaler", "#2f80ed", "-", "v"),
    ("naive", "#7f7f7f", "-", "D"),
    ("kept", "#7f7f7f", "--", "P"),
    ("compile", "#1f9e89", "-.", "X"),
)


def draw_step(rows: list[Record]) -> str:
    """Draw the share of a copy's speed over the number of tensors, with clipping if it was run."""
    clip = any(row["clip"] for row in rows)
    rows = [row for row in rows if row["clip"] == clip and row["threads"] == 1]
    halves = sorted({row["half"] for row in rows}, reverse=True)
    counts = sorted({row["parameters"] for row in rows})
    size = (3.0 * len(counts) + 1.2, 2.7 * len(halves) + 1.0)
    with mpl.rc_context(_context("step")):
        figure = Figure(figsize=size, layout="constrained")
        grid = figure.subplots(len(halves), len(counts), sharex=True, sharey=True, squeeze=False)
        for i, half in enumerate(halves):
            for j, count in enumerate(counts):
                chosen = [r for r in rows if (r["half"], r["parameters"]) == (half, count)]
                _draw_shares(grid[i, j], chosen)
                grid[i, j].set_title(f"{half}, {count:,} parameters", fontsize=10)
                if half == halves[-1]:
                    grid[i, j].set_xlabel("tensors")
        figure.supylabel("share of a copy's speed", fontsize=10)
        handles, labels = grid[0, 0].get_legend_handles_labels()
        figure.legend(
            handles,
            [re.sub("preamp O[25]", "preamp O2/O5", label) for label in labels],
            loc="outside lower center",
            ncols=3,
            frameon=False,
            fontsize=9,
        )
        return _svg(figure, "Share of a copy's speed that each variant of the update reaches")


def _draw_shares(axes: Axes, rows: list[Record]) -> None:
    for name in dict.fromkeys(row["name"] for row in rows):
        look = next((look for look in _LOOKS if look[0] in name), None)
        if look is None or name.startswith("preamp O0"):
            continue
        points = sorted((r["tensors"], r["share_of_copy"]) for r in rows if r["name"] == name)
        _, colour, line, marker = look
        axes.plot(
            [x for x, _ in points],
            [y for _, y in points],
            color=colour,
            linestyle=line,
            marker=marker,
            markersize=5,
            label=name,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.minorticks_off()
    axes.axhline(1.0, color=_INK, linewidth=0.8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:g}%")
    axes.grid(alpha=0.25, color=_INK)


def draw_train(rows: list[Record]) -> str:
    """Draw the time of a step with preamp over the same by hand."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    ours = [row for row in rows if row["name"].startswith("preamp")]
    with mpl.rc_context(_context("train")):
        figure = Figure(figsize=(7.2, 0.6 + 0.3 * len(ours) + 0.4), layout="constrained")
        grid = figure.subplots(1, len(models), sharex=True, squeeze=False)[0]
        for axes, model in zip(grid, models, strict=True):
            chosen = [row for row in ours if row["model"] == model]
            middle = [row["best_ratio"] for row in chosen]
            axes.scatter(middle, range(len(chosen)), color="#d1495b", zorder=3)
            for place, row in enumerate(chosen):
                spread = (row["ratio_p20"], row["ratio_p80"])
                axes.plot(spread, (place, place), color="#d1495b", linewidth=2, alpha=0.5)
            axes.set_yticks(
                range(len(chosen)), [row["name"].removeprefix("preamp ") for row in chosen]
            )
            axes.invert_yaxis()
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.axvline(1.0, color=_INK, linewidth=0.8)
            axes.set_title(model, fontsize=10)
            axes.grid(alpha=0.25, color=_INK)
        figure.supxlabel("time of a step over the same by hand (line: p20–p80)", fontsize=10)
        return _svg(figure, "Time of a training step with preamp over the same by hand")


def _context(name: str) -> dict[str, object]:
    look: dict[str, object] = {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 9}
    return look | dict.fromkeys(_INKED, _INK)


def _svg(figure: Figure, title: str) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    text = buffer.getvalue().replace(_INK, "currentColor")
    text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font: \1px sans-serif", text)
    text = re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
    return re.sub(r"(<svg\b[^>]*>)", rf"\1<title>{title}</title>{_STYLE}", text, count=1)
