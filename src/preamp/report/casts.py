# SPDX-License-Identifier: BSD-3-Clause
"""The cast audit: what was cast, and where."""

from __future__ import annotations

from preamp.report import words
from preamp.report.blocks import Block, Missing, Section, Table, Text, columns
from preamp.report.gather import Run
from preamp.report.svg import name

CASTS = 40  # lines of the cast audit; the rest is summed up


def casts_section(run: Run, prefix: str) -> Section:
    """Make the part about casts; ``prefix`` is of all ids."""
    table = _table(run, prefix)
    if table is not None:
        lead = "What function casts changed the dtype of, and where the function was called."
        return Section(name=prefix, title="Cast audit", lead=lead, blocks=[table])
    if run.casts is not None:
        block: Block = Text(text="Nothing was cast.")
    else:
        do = 'Train at O1 or O4 with `numerics="full"` to have it in the next run'
        block = Missing(what="Casts of functions were not recorded", do=do)
    return Section(name=prefix, title="Cast audit", blocks=[block])


def _table(run: Run, prefix: str) -> Table | None:
    """List what was cast, most bytes first."""
    if run.casts is None or not run.casts.casts:
        return None
    audit = sorted(run.casts.casts, key=lambda cast: -cast.bytes)
    total = sum(cast.bytes for cast in audit) or 1
    rows: list[list[str]] = [
        [
            name(cast.function, 40),
            f"{words.shown(cast.source, 16)} → {words.shown(cast.target, 16)}"
            + (f": {words.shown(cast.note, 40)}" if cast.note else ""),
            f"{cast.calls:,}",
            words.size(cast.bytes),
            words.share(cast.bytes / total),
            name(cast.where),
        ]
        for cast in audit[:CASTS]
    ]
    rest = audit[CASTS:]
    if rest:
        calls, count = sum(cast.calls for cast in rest), sum(cast.bytes for cast in rest)
        cells = [f"{calls:,}", words.size(count), words.share(count / total), ""]
        rows.append([f"{len(rest):,} others", "", *cells])
    calls = sum(cast.calls for cast in audit)
    numbers, last = ("tensors", "moved", "share"), "source line"
    return Table(
        name=f"{prefix}-list",
        caption=f"{words.counted(calls, 'cast')}, {words.size(total)} read and written, up to step "
        f"{run.casts.step:,}",
        columns=columns("function", "cast", *numbers, last, numbers=numbers, wide=(last,)),
        rows=rows,
    )
