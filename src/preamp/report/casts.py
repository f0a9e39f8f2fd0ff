# SPDX-License-Identifier: BSD-3-Clause
"""The cast audit: what was cast, where, and the line that most of it comes from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Final

from preamp.report import words
from preamp.report.blocks import Block, Missing, Section, Table, Text, columns
from preamp.report.finding import Finding
from preamp.report.gather import Run
from preamp.report.svg import name

CASTS = 40  # lines of the cast audit; the rest is summed up
LINE_SHARE: Final = 0.5
LINE_BYTES: Final = 2**20


def casts_of_one_line(run: Run) -> Iterator[Finding]:
    """Yield the line of source that most bytes are cast for."""
    by_line: Counter[str] = Counter()
    for cast in run.casts.casts if run.casts else ():
        by_line[cast.where] += cast.bytes
    total = sum(by_line.values())
    for where, count in by_line.most_common(1):
        if len(by_line) > 1 and total >= LINE_BYTES and count > LINE_SHARE * total:
            place, part = words.shown(where), words.share(count / total)
            yield Finding(
                id="casts-of-one-line",
                title="One line of source does most of the casting",
                number=f"At {place}, {words.size(count)} are cast: {part} of all.",
                do="Cast its input once, outside a loop, or run the module at the precision of its"
                " input.",
                where=place,
            )


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
