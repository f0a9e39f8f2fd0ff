# SPDX-License-Identifier: BSD-3-Clause
"""Bytes by category, a row for each run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from preamp.report import words
from preamp.report.blocks import Missing, Section, Table, columns
from preamp.report.gather import Run

ORDER: Final = ("weights", "masters", "gradients", "optimizer state", "buffers")
"""Categories from left to right; others follow."""


def categories_of(runs: Sequence[Run]) -> list[str]:
    """Return all categories that any run has bytes in, in their order."""
    found = {
        name for run in runs if run.memory for name, n in run.memory.categories.items() if n > 0
    }
    known = [name for name in ORDER if name in found]
    return known + sorted(found.difference(ORDER))


def memory_section(runs: Sequence[Run], prefix: str) -> Section:
    """Make the part about memory, of one run or of several; ``prefix`` is of all ids."""
    categories = categories_of(runs)
    if not categories:
        missing = Missing(
            what="Bytes were not counted",
            do='Pass `numerics="light"` to `preamp.initialize`, and take two steps or more',
        )
        return Section(name=prefix, title="Memory", blocks=[missing])
    numbers = (*(words.shown(category, 32) for category in categories), "all")
    counts = [(run.name, run.memory.categories) for run in runs if run.memory]
    table = Table(
        name=f"{prefix}-table",
        caption="Bytes held from one step to the next, by category",
        columns=columns("run" if len(runs) > 1 else "", *numbers, numbers=numbers),
        rows=[
            [words.shown(name) or "held", *map(words.size, _sizes(held, categories))]
            for name, held in counts
        ],
    )
    return Section(name=prefix, title="Memory", blocks=[table])


def _sizes(held: dict[str, int], categories: Sequence[str]) -> list[int]:
    return [*(held.get(category, 0) for category in categories), sum(held.values())]
