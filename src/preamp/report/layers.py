# SPDX-License-Identifier: BSD-3-Clause
"""What each layer has near the ends of its format, in numbers and, where it overflowed, drawn."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from preamp.numerics import TensorStatistics
from preamp.report import words
from preamp.report.blocks import Block, Figure, Section, Table, Text
from preamp.report.drawing import exponents_picture
from preamp.report.finding import Finding, named
from preamp.report.gather import Run, latest
from preamp.report.html import name
from preamp.report.skips import gradient_overflows
from preamp.report.tensors import HEADROOM, bad_since, totals

ROWS = 60  # layers in the table
PICTURES = 4  # layers whose exponents are drawn
STALLED_SHARE: Final = 0.3  # part of the weights that a step may leave as they were

Tensors = Sequence[TensorStatistics]  # of one layer in one look


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
    return sum(counts) / nonzero if nonzero else math.nan


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """What was seen of the gradients of a module."""

    name: str  # qualified name of the module
    is_scaled: bool  # whether a dynamic scale brings it close to the end, and now and then beyond
    looks: Sequence[Tensors]  # oldest first

    @property
    def is_broken(self) -> bool:
        """Whether a value was infinite or nan that should not have been."""
        return not self.is_scaled and any(t.nonfinite for tensors in self.looks for t in tensors)

    @property
    def headroom(self) -> float:
        """The least of all looks; infinite where all was zero."""
        rooms = (t.headroom for tensors in self.looks for t in tensors)
        return min((room for room in rooms if room is not None), default=math.inf)

    @property
    def worst(self) -> float:
        """The largest share of underflow; nan if nothing was finite and other than zero."""
        return max(map(underflow, self.looks), key=_rank)

    @property
    def is_near(self) -> bool:
        """Whether it is close to an overflow."""
        return not self.is_scaled and self.headroom < HEADROOM

    def cells(self, stalled: float) -> list[str]:
        """What stands in its row."""
        largest = max(t.max_abs for tensors in self.looks for t in tensors)
        return [
            name(self.name),
            "inf or nan" if self.is_broken else words.magnitude(largest),
            words.headroom(self.headroom),
            words.share(self.worst),
            words.share(lost(self.looks[-1])),
            words.share(zeros(self.looks[-1])),
            words.share(stalled),
        ]


def layers_of(run: Run) -> list[Layer]:
    """Sum up what was looked at by module, those in trouble first."""
    found: dict[str, dict[tuple[int, int], list[TensorStatistics]]] = {}
    for record in run.numerics:
        for tensor in record.tensors:
            if tensor.what == "gradient":
                looks = found.setdefault(module_of(tensor.name), {})
                looks.setdefault((record.step, record.optimizer), []).append(tensor)
    layers = [
        Layer(name=module, is_scaled=run.is_dynamic, looks=[*looks.values()])
        for module, looks in found.items()
    ]
    return sorted(layers, key=lambda x: (not x.is_broken, not x.is_near, -_rank(x.worst)))


def module_of(name: str) -> str:
    """Return the module that a parameter belongs to."""
    return name.rpartition(".")[0] or name


def _rank(share: float) -> float:
    """A number to sort shares by; nan comes below all others."""
    return -1.0 if math.isnan(share) else share


def layers_section(run: Run, prefix: str) -> Section:
    """Make the part about layers; ``prefix`` is of all ids."""
    layers = layers_of(run)
    if not layers:
        text = 'Gradients were not looked at. Pass `numerics="light"` to `preamp.initialize`.'
        return Section(name=prefix, title="Layers", blocks=[Text(text=text)])
    form = layers[0].looks[-1][0].form
    lead = (
        f"How near values come to the ends of {form}, with the loss scale on. Headroom: by how many"
        " powers of two the largest may grow. Underflow: the share below the smallest normal"
        " number, in the worst look; lost: below the smallest of all. Stalled: half weights that a"
        " step left as they were, for too small an update."
    )
    if not run.half:
        lead += f" This run is in float32: the shares say what {form} would lose."
    stalled = stalled_shares(run)
    if stalled and run.has_masters:
        lead += " Updates that stall are harmless here: masters keep them until they add up."
    numbers = ("largest", "headroom", "underflow", "lost", "zeros", "stalled")
    count = words.counted(len(layers), "layer")
    table = Table(
        name=f"{prefix}-list",
        caption=f"{f'The first {ROWS} of {count}' if len(layers) > ROWS else count}, those in"
        " trouble first",
        columns=("layer", *numbers),
        numbers=numbers,
        wide=("layer",),
        rows=[layer.cells(stalled.get(layer.name, math.nan)) for layer in layers[:ROWS]],
    )
    return Section(name=prefix, title="Layers", lead=lead, blocks=[*_pictures(run, prefix), table])


def _pictures(run: Run, prefix: str) -> Iterator[Block]:
    """Draw the exponents of the gradients that overflowed first, most often first."""
    overflows = [o for o in gradient_overflows(run) if o.parameters]
    firsts = Counter(overflow.parameters[0] for overflow in overflows)
    looks = [
        (record.step, {t.name: t for t in record.tensors if t.what == "gradient" and t.histogram})
        for record in run.numerics
    ]
    for index, (parameter, count) in enumerate(firsts.most_common(PICTURES)):
        last = max(o.step for o in overflows if o.parameters[0] == parameter)
        seen = [(step, by[parameter]) for step, by in looks if parameter in by and step <= last]
        if not seen:
            continue
        step, tensor = seen[-1]
        bad = words.counted(tensor.nonfinite, "value")
        yield Figure(
            title=f"Gradient of {words.shown(parameter)}",
            body=exponents_picture(tensor, f"{prefix}-exponents-{index}"),
            caption=f"It overflowed first in {words.counted(count, 'step')}. These are its values"
            f" at step {step:,}, with a loss scale of {words.scale(tensor.scale)}"
            f"{f'; {bad} infinite or nan are not drawn' if tensor.nonfinite else ''}. Shaded is"
            f" what {tensor.form} holds in full; beyond the dashed lines it holds nothing.",
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
        first, largest = next(iter(rows.items()))
        yield Finding(
            id="updates-stalled",
            title="Updates round to nothing",
            number=f"{words.share(stalled)} of the half weights stayed as they were although they"
            f" have a gradient; {words.share(largest)} in {words.shown(first)}.",
            do="Keep float32 masters (O2, O5), or float32 weights (O1, O4).",
            step=bad_since(totals(run, lambda t: t.stalled), lambda share: share > STALLED_SHARE),
            where=named([name for name, share in rows.items() if share > STALLED_SHARE]),
        )
