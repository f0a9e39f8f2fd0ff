# SPDX-License-Identifier: BSD-3-Clause
"""The parts of a report on one run, its tables, and the table that compares runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from preamp.numerics import OverflowRecord, TensorStatistics, TraceRecord
from preamp.report import exponents, layers, memory, pictures, timeline, words
from preamp.report.advice import Finding, judge
from preamp.report.blocks import Advice, Block, Facts, Missing, Section, Table, Text, columns
from preamp.report.course import first_parameters, place_of
from preamp.report.gather import Run
from preamp.report.svg import joined, name, tag
from preamp.report.timeline import is_smoothed, smoothed

FIRST, LAST = 20, 30
"""Skipped steps that are listed one by one: from the start, and from the end."""

CAUSES = 40  # parameters that the others are summed up by
PLACE_LIMIT = 240  # characters of a module, its class, operation and line
OTHERS = 20  # parameters of one overflow that are named
MODULES = 60  # rows of what went through modules
CASTS = 40  # lines of the cast audit; the rest is summed up


def skips(run: Run, prefix: str) -> list[Table]:
    """List the skipped steps with their causes; many are summed up."""
    causes = {(o.step, o.optimizer): o for o in run.overflows}
    steps = sorted({*causes, *((step.step, step.optimizer) for step in run.skipped)})
    if not steps:
        return []
    listed = steps if len(steps) <= FIRST + LAST else [*steps[:FIRST], *steps[-LAST:]]
    what = _what(run)
    caption = f"All {words.counted(len(steps), what)}" if len(steps) > 1 else f"The {what}"
    if len(listed) < len(steps):
        caption = f"The first {FIRST} and the last {LAST} of {words.counted(len(steps), what)}"
    # Each optimizer counts its own steps.
    has_several = any(step.optimizer for step in run.steps) or any(index for _, index in steps)
    numbers = ("step", *(["optimizer"] if has_several else []), "loss scale")
    titles = (*numbers, "cause", "first in", "largest finite", "trace")
    rows = [
        [f"{step:,}", *([str(index)] if has_several else []), *_cause(causes.get((step, index)))]
        for step, index in listed
    ]
    table = Table(
        name=f"{prefix}-list",
        caption=caption,
        columns=columns(*titles, numbers=(*numbers, "largest finite"), wide=("first in", "trace")),
        rows=rows,
    )
    return [table] if len(listed) == len(steps) else [table, _by_cause(run, prefix)]


def _what(run: Run) -> str:
    """What overflows did: at a static scale the step is taken all the same."""
    return "skipped step" if all(o.was_skipped for o in run.overflows) else "overflow"


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
    which = "one of " if overflow.candidates > 1 else ""
    named = [tag("li", name(other)) for other in others[:OTHERS]]
    if len(others) > OTHERS:
        named.append(tag("li", f"and {len(others) - OTHERS:,} more"))
    summary = tag("summary", f"and {len(others):,} more")
    return joined([which, name(first), tag("details", summary, tag("ul", *named))])


def _trace(trace: TraceRecord | None) -> str:
    if trace is None:
        return words.MISSING
    what = {
        "forward": "output",
        "data": "argument",
        "given": "argument",
        "weight": "parameter",
    }.get(trace.phase, "gradient")
    what = "value" if trace.phase in ("input cast", "output cast") else what
    return joined(
        [
            name(place_of(trace), PLACE_LIMIT),
            f": {what} in {trace.dtype} became {trace.output_found}",
            ""
            if trace.given_max_abs is None
            else f"; what went in reached {words.magnitude(trace.given_max_abs)}",
            ""
            if trace.float32 is None
            else f". {words.shown(trace.float32.told(trace.dtype), words.SENTENCE_LIMIT)}",
        ]
    )


def _by_cause(run: Run, prefix: str) -> Table:
    first = Counter(
        (_kind(o), first_parameters(o) if o.parameters else "") for o in run.overflows
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
        caption=f"All {_what(run)}s by cause",
        columns=columns("first in", "cause", "steps", numbers=("steps",), wide=("first in",)),
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


def comparison(runs: Sequence[Run], findings: Sequence[Sequence[Finding]], prefix: str) -> Table:
    """List the runs with their main numbers and findings; ``prefix`` is of the table's id."""
    of_losses = "; last losses are running medians" if any(map(is_smoothed, runs)) else ""
    numbers, last = ("steps", "skipped", "last loss", "loss scale", "memory"), "findings"
    return Table(
        name=f"{prefix}-table",
        caption=f"The main numbers{of_losses}",
        columns=columns("run", "level", *numbers, last, numbers=numbers, wide=(last,)),
        rows=[_compared(run, index, findings[index]) for index, run in enumerate(runs)],
    )


def _compared(run: Run, index: int, findings: Sequence[Finding]) -> list[str]:
    losses = smoothed(run.first_losses)
    scales = run.first_scales
    memory = sum(run.memory.categories.values()) if run.memory else None
    found = "; ".join(f"{f.severity.word}: {f.line}" for f in findings)
    return [
        tag("a", tag("bdi", words.shown(run.name)), href=f"#run{index}"),
        words.shown(run.start.opt_level, 16) if run.start else words.MISSING,
        f"{len(run.steps):,}",
        f"{len(run.skipped):,}",
        words.magnitude(losses[-1][1]) if losses else words.MISSING,
        words.scale(scales[-1][1]) if scales else words.MISSING,
        words.MISSING if memory is None else words.size(memory),
        found or judge(run, []).title,
    ]


def sections_of(
    run: Run, prefix: str, findings: Sequence[Finding], *, with_memory: bool = True
) -> list[Section]:
    """Make all parts of a run's report, also of what is missing; ``prefix`` is of all ids."""
    parts = [
        _advice(run, prefix, findings),
        timeline.timeline_section(run, f"{prefix}timeline"),
        _skips(run, f"{prefix}skips"),
        layers.underflow_section(run, f"{prefix}underflow"),
        exponents.exponents_section(run, f"{prefix}exponents"),
        layers.stall_section(run, f"{prefix}stall"),
        _of_modules(run, f"{prefix}modules"),
        *([memory.memory_section([run], f"{prefix}memory")] if with_memory else []),
        _casts(run, f"{prefix}casts"),
        _setup(run, f"{prefix}setup"),
    ]
    return [part for part in parts if part is not None]


def _advice(run: Run, prefix: str, findings: Sequence[Finding]) -> Section:
    block: Block = Text(text=f"{judge(run, []).title}.")
    if findings:
        block = Advice(items=pictures.beside(run, findings, prefix))
    return Section(name=f"{prefix}advice", title="What to do", blocks=[block])


def _skips(run: Run, prefix: str) -> Section:
    listed = skips(run, prefix)
    lead = (
        "A step is skipped when a gradient is infinite or not a number; the loss scale then falls."
    )
    title = "Skipped steps"
    if any(not overflow.was_skipped for overflow in run.overflows):
        lead, title = f"{lead} At a static loss scale it is taken all the same.", "Overflows"
    if not listed:
        return Section(name=prefix, title=title, blocks=[Text(text="No step was skipped.")])
    named = (
        "Named is the parameter whose gradient was the first, in the order of the backward pass."
    )
    return Section(name=prefix, title=title, lead=f"{lead} {named}", blocks=listed)


def _of_modules(run: Run, prefix: str) -> Section | None:
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
    under = max(t.below_normal / max(1, t.elements - t.zeros - t.nonfinite) for _, t in looks)
    return -math.inf if broken else headroom, [
        name(worst.name, 48),
        worst.what,
        worst.dtype,
        "inf or nan" if broken else words.magnitude(worst.max_abs),
        f"{step:,}",
        words.MISSING if headroom == math.inf else f"{headroom:.1f}",
        words.share(under),
        words.share(worst.zeros / max(1, worst.elements)),
    ]


def _casts(run: Run, prefix: str) -> Section:
    table = casts(run, prefix)
    if table is not None:
        lead = "What function casts changed the dtype of, and where the function was called."
        return Section(name=prefix, title="Cast audit", lead=lead, blocks=[table])
    if run.casts is not None:
        block: Block = Text(text="Nothing was cast.")
    else:
        do = 'Train at O1 or O4 with `numerics="full"` to have it in the next run'
        block = Missing(what="Casts of functions were not recorded", do=do)
    return Section(name=prefix, title="Cast audit", blocks=[block])


def _setup(run: Run, prefix: str) -> Section | None:
    if run.start is None:
        return None
    facts = [(words.shown(k, 40), words.shown(v)) for k, v in run.start.policy.items()]
    return Section(name=prefix, title="Settings", blocks=[Facts(facts=facts)]) if facts else None
