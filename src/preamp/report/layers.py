# SPDX-License-Identifier: BSD-3-Clause
"""Statistics of parameters, summed up by module and by time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from preamp.numerics import NumericsRecord, TensorStatistics
from preamp.report.gather import Run

ROWS = 24
"""Modules that are shown; the others are summed up."""

DETAILS = 300
"""Modules in the full list."""

TIMES = 96
"""Columns of a heat map."""


@dataclass(slots=True, kw_only=True)
class Underflow:
    """Counts of a module's gradients at one time.

    Attributes:
        elements: How many there are.
        exact_zeros: How many are exactly zero.
        nonzero: How many are neither that nor infinite or nan; the next two are of these.
        below_normal: Below the format's smallest normal value: digits are lost.
        below_subnormal: Below its smallest value of all: lost.
    """

    elements: int = 0
    exact_zeros: int = 0
    nonzero: int = 0
    below_normal: int = 0
    below_subnormal: int = 0

    @property
    def share(self) -> float:
        """Part of the values that are not zero that lose digits, or all; nan if none is finite."""
        return self._part(self.below_normal)

    @property
    def lost(self) -> float:
        """Part of the values that are not zero that are lost altogether."""
        return self._part(self.below_subnormal)

    @property
    def zeros(self) -> float:
        """Part of all elements that are exactly zero."""
        return self.exact_zeros / self.elements if self.elements else 0.0

    def _part(self, count: int) -> float:
        if self.nonzero:
            return count / self.nonzero
        return 0.0 if self.exact_zeros == self.elements else math.nan

    def add(self, tensor: TensorStatistics) -> None:
        """Count one more tensor."""
        self.elements += tensor.elements
        self.exact_zeros += tensor.zeros
        self.nonzero += tensor.elements - tensor.zeros - tensor.nonfinite
        self.below_normal += tensor.below_normal
        self.below_subnormal += tensor.below_subnormal


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One row of the heat map.

    Attributes:
        name: Qualified name of the module.
        cells: Share of underflow by column, the worst of what falls into it; ``None`` where
            nothing finite does.
        worst: The highest share; nan if no gradient was finite.
        worst_step: Its step.
        latest: The counts at the end.
    """

    name: str
    cells: tuple[float | None, ...]
    worst: float
    worst_step: int
    latest: Underflow


@dataclass(frozen=True, slots=True, kw_only=True)
class HeatMap:
    """Underflow of all modules over time.

    Attributes:
        first: First step looked at.
        last: Last step looked at.
        layers: Worst first.
        form: Format that the shares are taken against.
    """

    first: int
    last: int
    layers: tuple[Layer, ...]
    form: str


def module_of(name: str) -> str:
    """Return the module that a parameter belongs to."""
    return name.rpartition(".")[0] or name


def heat_map(run: Run, times: int = TIMES) -> HeatMap | None:
    """Sum up the underflow of gradients by module; ``None`` if no gradient was looked at."""
    looks = [record for record in run.numerics if gradients_of([record])]
    if not looks:
        return None
    steps = sorted({record.step for record in looks})
    columns = {
        step: index * min(times, len(steps)) // len(steps) for index, step in enumerate(steps)
    }
    rows: dict[str, dict[int, Underflow]] = {}
    for record in looks:
        for tensor in gradients_of([record]):
            row = rows.setdefault(module_of(tensor.name), {})
            row.setdefault(record.step, Underflow()).add(tensor)
    layers = [_layer(name, row, columns) for name, row in rows.items()]
    layers.sort(key=lambda layer: (-_rank(layer.worst), -_rank(layer.latest.share)))
    form = gradients_of(looks[-1:])[0].form
    return HeatMap(first=steps[0], last=steps[-1], layers=tuple(layers), form=form)


def _layer(name: str, row: dict[int, Underflow], columns: dict[int, int]) -> Layer:
    cells: list[float | None] = [None] * (max(columns.values()) + 1)
    for step, counts in row.items():
        if not math.isnan(counts.share):
            before = cells[columns[step]]
            cells[columns[step]] = counts.share if before is None else max(before, counts.share)
    worst_step = max(row, key=lambda step: _rank(row[step].share))
    return Layer(
        name=name,
        cells=tuple(cells),
        worst=row[worst_step].share,
        worst_step=worst_step,
        latest=row[max(row)],
    )


def worst_of(layers: Sequence[Layer]) -> Layer:
    """Sum several rows up as one: the worst of each column."""
    width = max(len(layer.cells) for layer in layers)
    worst = max(layers, key=lambda layer: _rank(layer.worst))
    columns = [[r.cells[i] for r in layers if i < len(r.cells)] for i in range(width)]
    return Layer(
        name="others",
        cells=tuple(max((c for c in column if c is not None), default=None) for column in columns),
        worst=worst.worst,
        worst_step=worst.worst_step,
        latest=max((layer.latest for layer in layers), key=lambda latest: _rank(latest.share)),
    )


def _rank(share: float) -> float:
    """A number to sort shares by; nan comes below all others."""
    return -1.0 if math.isnan(share) else share


def gradients_of(records: Iterable[NumericsRecord]) -> list[TensorStatistics]:
    """Return the statistics of gradients."""
    return [t for record in records for t in record.tensors if t.what == "gradient"]


def latest(run: Run) -> list[TensorStatistics]:
    """Return the latest statistics of each tensor, in the order of the last record that has it."""
    found: dict[tuple[str, str], TensorStatistics] = {}
    for record in run.numerics:
        for tensor in record.tensors:
            found.pop((tensor.what, tensor.name), None)
            found[tensor.what, tensor.name] = tensor
    return list(found.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Weights of one module whose latest update rounded to nothing.

    Attributes:
        name: Qualified name of the module.
        stalled: Elements that a step left as they were although they have a gradient.
        elements: All elements that were looked at.
    """

    name: str
    stalled: int
    elements: int

    @property
    def share(self) -> float:
        """Part of the elements."""
        return self.stalled / self.elements if self.elements else 0.0


def stalls(run: Run) -> list[Stall]:
    """Sum up the stall meter by module, the largest share first; empty if it was not on."""
    rows: dict[str, tuple[int, int]] = {}
    for tensor in latest(run):
        if tensor.stalled is not None:
            stalled, elements = rows.get(module_of(tensor.name), (0, 0))
            rows[module_of(tensor.name)] = (stalled + tensor.stalled, elements + tensor.elements)
    found = [Stall(name=name, stalled=s, elements=n) for name, (s, n) in rows.items()]
    return sorted(found, key=lambda stall: -stall.share)


def total_stall(rows: Sequence[Stall]) -> Stall:
    """Add modules up."""
    stalled, elements = sum(row.stalled for row in rows), sum(row.elements for row in rows)
    return Stall(name="", stalled=stalled, elements=elements)
