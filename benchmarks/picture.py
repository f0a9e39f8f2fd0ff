# SPDX-License-Identifier: BSD-3-Clause
"""Draw the picture of the README, light and dark, from the newest row of a demo run.

``make docs`` does so. ``python benchmarks/picture.py preamp-demo/results.json`` first appends what
that run of ``make demo`` measured to ``benchmarks/results/demo.jsonl``. Times are not in it: they
need a machine of their own, and what is drawn is the same on a busy one.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from preamp.report.chart import Scale, finite_range, linear, running_median
from preamp.report.svg import Html, coordinate, tag
from preamp_bench.options import RESULTS
from preamp_bench.records import Record, append, provenance, read

ROWS = RESULTS / "demo.jsonl"
DOCS = Path(__file__).parents[1] / "docs"

COLOURS = {
    "light": {"ink": "#1c1d1f", "quiet": "#5b5e63", "grid": "#dedfdb"}
    | {"O0": "#6b6e73", "O4": "#1b7d6b", "O5": "#2463c2"}
    | {"O1": "#b85206", "O2": "#b02a5b", "O3": "#8a3fb8"},
    "dark": {"ink": "#e9e9e6", "quiet": "#a3a6ab", "grid": "#34373b"}
    | {"O0": "#b4b7bc", "O4": "#4fc6ae", "O5": "#6ea8ff"}
    | {"O1": "#f39a4e", "O2": "#f27fa8", "O3": "#c890ee"},
}
KEPT = ("level", "held_out_bits", "activation_bytes", "memory")
"""What a row has of each level, beside its losses."""

WIDTH, HEIGHT = 880, 300
PLOT = (44.0, 452.0, 40.0, 258.0)  # left, right, top and bottom of the curves
BARS = {"held_out_bits": 528.0, "activation_bytes": 722.0}  # left ends
LONGEST_BAR, BAR, PITCH = 100.0, 18.0, 37.0
REACH = 10  # steps to either side in a median
FIRST = 10  # steps that the curves leave out: the fall from 8 bits would flatten all the rest


def row_of(document: dict[str, Any]) -> Record:
    """The row of a ``results.json``; what was trained is said in it, and where."""
    levels = [
        {name: level[name] for name in KEPT}
        | {"losses": [None if loss is None else round(loss, 4) for loss in level["losses"]]}
        for level in document["levels"]
    ]
    own = {"name": "demo", "group": "demo", "benchmark": "demo", "status": "measured"}
    facts = provenance(torch.device("cpu")) | {"device": document["device"]}
    del facts["threads"]  # of this process; the device's name tells those of the run
    return {**own, **facts, "config": document["config"], "levels": levels}


def draw(row: Record, look: str) -> str:
    """Draw a row as an SVG document in one of the `COLOURS`."""
    colours, levels = COLOURS[look], row["levels"]
    told = (f"{one['level']} " + ", ".join(_spelled(one, name) for name in BARS) for one in levels)
    title = f"Loss of the demo at each opt level; held-out loss and MiB kept: {'; '.join(told)}"
    children = [
        tag("title", title),
        *_curves(levels, colours),
        *_bars(levels, "held_out_bits", "held-out loss, bits per byte", colours),
        *_bars(levels, "activation_bytes", "kept activations, MiB", colours),
    ]
    return (
        tag(
            "svg",
            *(Html(f"\n{child}") for child in children),
            Html("\n"),
            xmlns="http://www.w3.org/2000/svg",
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            font_family="system-ui, sans-serif",
            font_size=13,
        )
        + "\n"
    )


def _curves(levels: Sequence[Record], colours: dict[str, str]) -> list[Html]:
    """The training loss of each level by step."""
    lines = {level["level"]: _points(level) for level in levels}
    every = [point for points in lines.values() for point in points]
    low, high = finite_range(y for _, y in every) or (0.0, 8.0)
    x = linear(0.0, max((x for x, _ in every), default=1), "{:g}".format)
    y = linear(low - 0.1, high, "{:g}".format, count=6)
    left, right, top, bottom = PLOT
    drawn = [_text("training loss, bits per byte", left, 20, colours["ink"])]
    for value, label in y.ticks:
        at = _across(y, value, bottom, top)
        drawn.append(tag("path", d=f"M{left:g} {at}H{right:g}", stroke=colours["grid"]))
        drawn.append(_text(label, left - 8, float(at) + 4, colours["quiet"], "end"))
    for value, label in x.ticks:
        at = float(_across(x, value, left, right))
        drawn.append(_text(label, at, bottom + 18, colours["quiet"], "middle"))
    drawn.append(_text("steps", right, bottom + 36, colours["quiet"], "end"))
    for name, points in reversed(lines.items()):  # float32 lies on top
        path = "L".join(
            f"{_across(x, a, left, right)} {_across(y, b, bottom, top)}" for a, b in points
        )
        look = {"fill": "none", "stroke": colours[name], "stroke_width": 2}
        drawn.append(tag("path", d=f"M{path}", stroke_linejoin="round", **look))
    return drawn


def _points(level: Record) -> list[tuple[int, float]]:
    losses = [float("nan") if loss is None else loss for loss in level["losses"]]
    smooth = running_median(losses, REACH)
    return [(n, y) for n, y in enumerate(smooth, 1) if n > FIRST and math.isfinite(y)]


def _across(scale: Scale, value: float, low: float, high: float) -> str:
    return coordinate(low + scale.place(value) * (high - low))


def _bars(levels: Sequence[Record], name: str, title: str, colours: dict[str, str]) -> list[Html]:
    """A bar for each level, as long as its number."""
    left, most = BARS[name], max(level[name] or 0.0 for level in levels)
    drawn = [_text(title, left, 20, colours["ink"])]
    for number, level in enumerate(levels):
        top = PLOT[2] + PITCH * number
        length, middle = LONGEST_BAR * (level[name] or 0.0) / most, top + BAR / 2 + 4.5
        colour = colours[level["level"]]
        drawn.append(_text(level["level"], left - 8, middle, colour, "end"))
        drawn.append(tag("rect", x=left, y=top, width=length, height=BAR, rx=2, fill=colour))
        drawn.append(_text(_spelled(level, name), left + length + 6, middle, colours["quiet"]))
    return drawn


def _spelled(level: Record, name: str) -> str:
    value = level[name]
    if value is None:
        return "–"
    return f"{value:.3f}" if name == "held_out_bits" else f"{value / 2**20:.1f}"


def _text(words: str, x: float, y: float, colour: str, anchor: str | None = None) -> Html:
    return tag("text", words, x=x, y=y, fill=colour, text_anchor=anchor)


def main(arguments: Sequence[str]) -> None:
    """Append the rows of the given results, then draw the newest row."""
    append(ROWS, [row_of(json.loads(Path(name).read_text("utf-8"))) for name in arguments])
    for look in COLOURS:
        DOCS.joinpath(f"demo-{look}.svg").write_text(draw(read(ROWS)[-1], look), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
