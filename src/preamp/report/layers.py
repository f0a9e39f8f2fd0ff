# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of parameters, summed up by module and by time, and drawn as a heat map."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from preamp.numerics import TensorStatistics
from preamp.report import words
from preamp.report.blocks import WITH_NUMERICS, Block, Missing, Section, Table, columns
from preamp.report.finding import Curve, Finding, named
from preamp.report.gather import Run, gradients_of, latest
from preamp.report.svg import Html, legend_of, name, picture, stretched, tag
from preamp.report.tensors import bad_since, totals

ROWS = 24  # modules that are drawn; the full list has the others
DETAILS = 300  # modules in the full list
STALLED_SHARE: Final = 0.3  # part of the weights that a step may leave as they were
TIMES = 96  # columns of a heat map


Tensors = Sequence[TensorStatistics]  # the gradients of one module at one time


def underflow(tensors: Tensors) -> float:
    """Part of the finite values that are not zero that lose digits, or all; nan if none is."""
    return _part(tensors, [t.below_normal for t in tensors])


def lost(tensors: Tensors) -> float:
    """Part of the values that are not zero that are lost altogether; nan if none is."""
    return _part(tensors, [t.below_subnormal for t in tensors])


def zeros(tensors: Tensors) -> float:
    """Part of all elements that are exactly zero."""
    return sum(t.zeros for t in tensors) / max(1, sum(t.elements for t in tensors))


def _part(tensors: Tensors, counts: Sequence[int]) -> float:
    nonzero = sum(t.nonzero for t in tensors)
    if nonzero:
        return sum(counts) / nonzero
    return math.nan if any(t.elements for t in tensors) else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One row of the heat map."""

    name: str  # qualified name of the module
    # Share of underflow by column, the worst of what falls into it; nan where nothing does that is
    # finite and not zero.
    cells: tuple[float, ...]
    worst: float  # the highest share; nan if no gradient was finite and other than zero
    worst_step: int  # its step
    latest: Tensors  # what there was at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Underflow of all modules over time."""

    first: int  # first step looked at
    last: int  # last step looked at
    layers: tuple[Layer, ...]  # worst first
    form: str  # format that the shares are taken against


def heat_map(run: Run, times: int = TIMES) -> HeatMap | None:
    """Sum up the underflow of gradients by module; ``None`` if no gradient was looked at."""
    looks = [record for record in run.numerics if gradients_of([record])]
    if not looks:
        return None
    steps = sorted({record.step for record in looks})
    columns = {
        step: index * min(times, len(steps)) // len(steps) for index, step in enumerate(steps)
    }
    rows: dict[str, dict[int, list[TensorStatistics]]] = {}
    for record in looks:
        for tensor in gradients_of([record]):
            row = rows.setdefault(module_of(tensor.name), {})
            row.setdefault(record.step, []).append(tensor)
    layers = [_layer(name, row, columns) for name, row in rows.items()]
    layers.sort(key=lambda layer: (-_rank(layer.worst), -_rank(underflow(layer.latest))))
    form = gradients_of(looks[-1:])[0].form
    return HeatMap(first=steps[0], last=steps[-1], layers=tuple(layers), form=form)


def _layer(name: str, row: Mapping[int, Tensors], columns: Mapping[int, int]) -> Layer:
    cells = [math.nan] * (max(columns.values()) + 1)
    shares = {step: underflow(tensors) for step, tensors in row.items()}
    for step, share in shares.items():
        cells[columns[step]] = max(cells[columns[step]], share, key=_rank)
    worst = max(shares, key=lambda step: _rank(shares[step]))
    return Layer(
        name=name, cells=tuple(cells), worst=shares[worst], worst_step=worst, latest=row[max(row)]
    )


def module_of(name: str) -> str:
    """Return the module that a parameter belongs to."""
    return name.rpartition(".")[0] or name


def _rank(share: float) -> float:
    """A number to sort shares by; nan comes below all others."""
    return -1.0 if math.isnan(share) else share


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
    description = f"{steps} no gradient was finite and other than zero."
    if not math.isnan(layer.worst):
        description = (
            f"{steps}; at most {words.share(layer.worst)}, at step {layer.worst_step:,}; at the"
            f" end {words.share(underflow(layer.latest))}."
        )
    return _strip(layer.cells, name, title, description)


def legend() -> Html:
    """List the shades."""
    return legend_of(
        (tag("span", class_=f"swatch h{i}", aria_hidden="true"), name)
        for i, (_, name) in enumerate(SHADES)
    )


def _strip(cells: Sequence[float], name: str, title: str, description: str) -> Html:
    parts: list[Html] = []
    left = 0
    for shade, group in groupby(cells, lambda cell: None if math.isnan(cell) else shade_of(cell)):
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


def underflow_section(run: Run, prefix: str) -> Section:
    """Make the part about underflow by layer; ``prefix`` is of all ids."""
    found = heat_map(run)
    title = "Underflow by layer"
    if found is None:
        missing = Missing(what="Gradients were not looked at", do=WITH_NUMERICS)
        return Section(name=prefix, title=title, blocks=[missing])
    lead = (
        f"Part of a layer's gradient, with the loss scale on, that is below the smallest normal"
        f" {found.form} number and so loses digits, or all of them. Worst layers first; time runs"
        f" from left to right, {axis(found)}. Where a gradient is zero altogether, or"
        " nothing of it finite, there is no share."
    )
    if not run.half:
        lead += f" This run is in float32: the shares say what {found.form} would lose."
    stalled = stalled_shares(run)
    if stalled and run.has_masters:
        lead += " Updates that stall are harmless here: masters keep them until they add up."
    blocks: list[Block] = [_heat_table(found, prefix)]
    if len(found.layers) > 1 or stalled:
        blocks.append(_heat_details(found, stalled, prefix))
    return Section(name=prefix, title=title, lead=lead, blocks=blocks)


def _heat_table(found: HeatMap, prefix: str) -> Table:
    rows = [
        [
            name(layer.name, 48),
            words.share(layer.worst),
            words.share(underflow(layer.latest)),
            strip(layer, found, f"{prefix}-{index}"),
        ]
        for index, layer in enumerate(found.layers[:ROWS])
    ]
    numbers, last = ("worst", "latest"), "over time"
    return Table(
        name=f"{prefix}-map",
        caption=f"Share of underflow by layer, {axis(found)}",
        columns=columns("layer", *numbers, last, numbers=numbers, wide=(last,)),
        rows=rows,
        is_fluid=True,
        after=legend(),
    )


def _heat_details(found: HeatMap, stalled: Mapping[str, float], prefix: str) -> Table:
    """List the numbers; ``stalled`` are the shares of `stalled_shares`, where they are known."""
    numbers = ["worst", "at step", "latest", "lost", "zeros", "headroom"]
    numbers += ["stalled"] if stalled else []
    shown = found.layers[:DETAILS]
    more = f", the worst {DETAILS} of them" if len(found.layers) > DETAILS else ""
    caption = (
        "Worst and latest: below the smallest normal number. Lost: below the smallest number of"
        " all. Zeros: exactly zero. Headroom: by how many powers of two the largest value may grow."
        " All but the worst are of the latest look"
    )
    if stalled:
        caption += ". Stalled: half weights that a step left as they were, for too small an update"
    return Table(
        name=f"{prefix}-all",
        summary=f"The numbers of all {words.counted(len(found.layers), 'layer')}{more}",
        caption=caption,
        columns=columns("layer", *numbers, numbers=numbers, wide=("layer",)),
        rows=[
            [
                name(layer.name),
                words.share(layer.worst),
                f"{layer.worst_step:,}",
                *(words.share(part(layer.latest)) for part in (underflow, lost, zeros)),
                words.headroom(
                    min(
                        (t.headroom for t in layer.latest if t.headroom is not None),
                        default=math.inf,
                    )
                ),
                *([words.share(stalled.get(layer.name, math.nan))] if stalled else []),
            ]
            for layer in shown
        ],
    )


def stalled_shares(run: Run) -> dict[str, float]:
    """The part of each module's half weights that the latest look saw stay, the largest first.

    Counted are weights that a step left as they were although they have a gradient.
    """
    rows: dict[str, tuple[int, int]] = {}
    for tensor in latest(run):
        if tensor.stalled is not None:
            stalled, elements = rows.get(module_of(tensor.name), (0, 0))
            rows[module_of(tensor.name)] = (stalled + tensor.stalled, elements + tensor.elements)
    shares = {name: stalled / max(1, elements) for name, (stalled, elements) in rows.items()}
    return dict(sorted(shares.items(), key=lambda row: -row[1]))


def updates_stalled(run: Run) -> Iterator[Finding]:
    """Yield the share of the weights whose update rounded to nothing, and is kept nowhere else."""
    rows = {} if run.has_masters else stalled_shares(run)
    looked_at = [t for t in latest(run) if t.stalled is not None]
    stalled = sum(t.stalled or 0 for t in looked_at) / max(1, sum(t.elements for t in looked_at))
    if rows and stalled > STALLED_SHARE:
        points = totals(run, lambda t: t.stalled)
        first, largest = next(iter(rows.items()))
        yield Finding(
            id="updates-stalled",
            title="Updates round to nothing",
            number=f"{words.share(stalled)} of the half weights stayed as they were although they"
            f" have a gradient; {words.share(largest)} in {words.shown(first)}.",
            do="Keep float32 masters (O2, O5), or float32 weights (O1, O4).",
            step=bad_since(points, lambda share: share > STALLED_SHARE),
            where=named([name for name, share in rows.items() if share > STALLED_SHARE]),
            curve=Curve(name="Part of the half weights that a step left as is", points=points),
        )
