# SPDX-License-Identifier: BSD-3-Clause
"""What went through the modules that were watched."""

from __future__ import annotations

import math
from collections.abc import Sequence

from preamp.numerics import TensorStatistics
from preamp.report import words
from preamp.report.blocks import Section, Table, columns
from preamp.report.gather import Run
from preamp.report.svg import name

MODULES = 60  # rows of what went through modules


def modules_section(run: Run, prefix: str) -> Section | None:
    """What was watched of modules; nothing is missing where nobody asked for it."""
    seen: dict[tuple[str, str], list[tuple[int, TensorStatistics]]] = {}
    for record in run.of_modules:
        for tensor in record.tensors:
            seen.setdefault((tensor.name, tensor.what), []).append((record.step, tensor))
    if not seen:
        return None
    rows = sorted(map(_of_module, seen.values()), key=lambda row: row[0])
    left_out = f", {MODULES} of {len(rows):,}" if len(rows) > MODULES else ""
    numbers = ("largest", "at step", "headroom", "underflow", "zeros")
    table = Table(
        name=f"{prefix}-list",
        caption=f"Those nearest to an overflow first{left_out}. Headroom: by how many powers of two"
        " the largest value may grow. Underflow: the worst share below the smallest normal number",
        columns=columns("module", "what", "dtype", *numbers, numbers=numbers, wide=("module",)),
        rows=[row for _, row in rows[:MODULES]],
    )
    lead = (
        "Inputs and outputs of modules, and the loss's gradients by them with the loss scale on,"
        f" as seen in {words.counted(len({r.step for r in run.of_modules}), 'step')}."
    )
    return Section(name=prefix, title="What went through modules", lead=lead, blocks=[table])


def _of_module(looks: Sequence[tuple[int, TensorStatistics]]) -> tuple[float, list[str]]:
    """By what its row is sorted, and the row."""
    broken = [(step, t) for step, t in looks if t.nonfinite]
    step, worst = broken[0] if broken else max(looks, key=lambda look: look[1].max_abs)
    headroom = min((t.headroom for _, t in looks if t.headroom is not None), default=math.inf)
    under = max(t.underflow for _, t in looks)
    return -math.inf if broken else headroom, [
        name(worst.name, 48),
        worst.what,
        worst.dtype,
        "inf or nan" if broken else words.magnitude(worst.max_abs),
        f"{step:,}",
        words.headroom(headroom),
        words.share(under),
        words.share(worst.zeros / max(1, worst.elements)),
    ]
