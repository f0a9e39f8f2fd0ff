# SPDX-License-Identifier: BSD-3-Clause
"""Tables of skipped steps and of casts, and the table that compares runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from preamp.numerics import OverflowRecord, TraceRecord
from preamp.report import words
from preamp.report.advice import advise, judge
from preamp.report.blocks import Column, Table
from preamp.report.gather import Run
from preamp.report.svg import Html, breakable, joined, tag
from preamp.report.timeline import is_smoothed, smoothed

FIRST, LAST = 20, 30
"""Skipped steps that are listed one by one: from the start, and from the end."""

CAUSES = 40
"""Parameters that the others are summed up by."""

OTHERS = 20
"""Parameters of one overflow that are named."""

CASTS = 40
"""Lines of the cast audit; the rest is summed up."""


def name(text: str, limit: int = words.NAME_LIMIT) -> Html:
    """Write a name from outside: in the font of code, isolated from the text around it."""
    return tag("code", tag("bdi", breakable(words.shown(text, limit))))


def skips(run: Run, prefix: str) -> list[Table]:
    """List the skipped steps with their causes; many are summed up."""
    causes = {(o.step, o.optimizer): o for o in run.overflows}
    steps = sorted({*causes, *((step.step, step.optimizer) for step in run.skipped)})
    if not steps:
        return []
    listed = steps if len(steps) <= FIRST + LAST else [*steps[:FIRST], *steps[-LAST:]]
    caption = f"All {len(steps):,} skipped steps" if len(steps) > 1 else "The skipped step"
    if len(listed) < len(steps):
        caption = f"The first {FIRST} and the last {LAST} of {len(steps):,} skipped steps"
    # Each optimizer counts its own steps.
    has_several = any(step.optimizer for step in run.steps) or any(index for _, index in steps)
    columns = (
        Column(title="step", is_number=True),
        *([Column(title="optimizer", is_number=True)] if has_several else []),
        Column(title="loss scale", is_number=True),
        Column(title="cause"),
        Column(title="first in", is_wide=True),
        Column(title="largest finite", is_number=True),
        Column(title="trace", is_wide=True),
    )
    rows = [
        [f"{step:,}", *([str(index)] if has_several else []), *_cause(causes.get((step, index)))]
        for step, index in listed
    ]
    table = Table(name=f"{prefix}-list", caption=caption, columns=columns, rows=rows)
    return [table] if len(listed) == len(steps) else [table, _by_cause(run, prefix)]


def _cause(overflow: OverflowRecord | None) -> list[str]:
    if overflow is None:
        return [words.MISSING, "not recorded", words.MISSING, words.MISSING, words.MISSING]
    old, new = words.scale(overflow.old_scale), words.scale(overflow.new_scale)
    largest = overflow.largest[0] if overflow.largest else None
    return [
        f"{old} → {new}",
        _kind(overflow),
        _first(overflow),
        words.magnitude(largest),
        _trace(overflow.trace),
    ]


def _kind(overflow: OverflowRecord) -> str:
    loss = f" (loss {overflow.loss_id})" if overflow.loss_id else ""
    if not overflow.loss_was_finite:
        return f"the loss itself was not finite{loss}"
    kinds: Sequence[str] = getattr(overflow, "kinds", ())  # newer files have them
    return f"gradient is {kinds[0] if kinds else 'inf or nan'}{loss}"


def _first(overflow: OverflowRecord) -> str:
    if not overflow.parameters:
        return "no gradient of this optimizer"
    first, *others = overflow.parameters
    if not others:
        return name(first)
    named = [tag("li", name(other)) for other in others[:OTHERS]]
    if len(others) > OTHERS:
        named.append(tag("li", f"and {len(others) - OTHERS:,} more"))
    summary = tag("summary", f"and {len(others):,} more")
    return joined([name(first), tag("details", summary, tag("ul", *named))])


def _trace(trace: TraceRecord | None) -> str:
    if trace is None:
        return words.MISSING
    what = "output" if trace.phase == "forward" else "gradient"
    return joined(
        [
            name(trace.module or "(the model)"),
            f" {words.shown(trace.type, 32)}, {trace.phase}: {what} in {trace.dtype} became"
            f" {trace.output_found}; what went in reached {words.magnitude(trace.input_max_abs)}",
        ]
    )


def _by_cause(run: Run, prefix: str) -> Table:
    first = Counter(
        (_kind(o), o.parameters[0] if o.parameters else "") for o in run.overflows
    ).most_common()
    rows = [
        [name(parameter) if parameter else "no gradient", kind, f"{count:,}"]
        for (kind, parameter), count in first[:CAUSES]
    ]
    if len(first) > CAUSES:
        rest = sum(count for _, count in first[CAUSES:])
        rows.append([f"{len(first) - CAUSES:,} others", "", f"{rest:,}"])
    return Table(
        name=f"{prefix}-causes",
        caption="All skipped steps by cause",
        columns=(
            Column(title="first in", is_wide=True),
            Column(title="cause"),
            Column(title="steps", is_number=True),
        ),
        rows=rows,
    )


def casts(run: Run, prefix: str) -> Table | None:
    """List what was cast, most bytes first."""
    if run.casts is None or not run.casts.casts:
        return None
    audit = sorted(run.casts.casts, key=lambda cast: -cast.bytes)
    total = sum(cast.bytes for cast in audit) or 1
    rows: list[list[str]] = [
        [
            name(cast.function, 40),
            f"{words.shown(cast.source, 16)} → {words.shown(cast.target, 16)}",
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
    return Table(
        name=f"{prefix}-list",
        caption=f"{words.counted(calls, 'cast')}, {words.size(total)} read and written, up to step "
        f"{run.casts.step:,}",
        columns=(
            Column(title="function"),
            Column(title="cast"),
            Column(title="tensors", is_number=True),
            Column(title="moved", is_number=True),
            Column(title="share", is_number=True),
            Column(title="source line", is_wide=True),
        ),
        rows=rows,
    )


def comparison(runs: Sequence[Run], prefix: str) -> Table:
    """List the runs with their main numbers; ``prefix`` is of the table's id."""
    of_losses = "; last losses are running means" if any(map(is_smoothed, runs)) else ""
    titles = ("steps", "skipped", "last loss", "loss scale", "memory")
    return Table(
        name=f"{prefix}-table",
        caption=f"The main numbers{of_losses}",
        columns=(
            Column(title="run"),
            Column(title="level"),
            *(Column(title=title, is_number=True) for title in titles),
            Column(title="findings", is_wide=True),
        ),
        rows=[_compared(run, index) for index, run in enumerate(runs)],
    )


def _compared(run: Run, index: int) -> list[str]:
    losses = smoothed(run.first_losses)
    scales = run.first_scales
    memory = sum(run.memory.categories.values()) if run.memory else None
    findings = "; ".join(f"{f.severity.word}: {f.title}" for f in advise(run))
    return [
        tag("a", tag("bdi", words.shown(run.name)), href=f"#run{index}"),
        words.shown(run.start.opt_level, 16) if run.start else words.MISSING,
        f"{len(run.steps):,}",
        f"{len(run.skipped):,}",
        words.magnitude(losses[-1][1]) if losses else words.MISSING,
        words.scale(scales[-1][1]) if scales else words.MISSING,
        words.MISSING if memory is None else words.size(memory),
        findings or judge(run, []).title,
    ]
