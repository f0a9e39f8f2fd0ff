# SPDX-License-Identifier: BSD-3-Clause
"""Skipped steps and loss scales: findings on them, a picture, and the skips with their causes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Final

from preamp.numerics import FORMATS, OverflowRecord, StepRecord, TraceRecord
from preamp.report import words
from preamp.report.blocks import Block, Figure, Section, Table, Text
from preamp.report.drawing import scale_picture
from preamp.report.finding import Finding
from preamp.report.gather import Run
from preamp.report.html import joined, name, tag

SAME_PLACE: Final = 3  # skipped steps that begin in one place before it is told of
SKIPS_IN_ROW: Final = 12  # the default scale of 2**16 comes down to 16 in as many
SKIPPED_SHARE: Final = 0.02  # part of the steps that may be skipped once a scale is found

SKIPPED_SPARE: Final = 2
"""As many may be skipped in any run, however short, unless they are half of its steps."""

SMALL: Final = 2.0**-8  # part of the largest number that gradients are small below
FLOOR: Final = 1.0

FIRST, LAST = 5, 10
"""Skipped steps that are listed one by one: from the start, and from the end."""

CAUSES = 40  # parameters that the others are summed up by
PLACE_LIMIT = 240  # characters of a module, its class, operation and line
OTHERS = 20  # parameters of one overflow that are named

_LOOK_AT_ZERO: Final = (
    "Look there for a root, norm, division or logarithm at zero or close to it, where its"
    " derivative is infinite or huge."
)

_PHASES: Final = {  # of a trace, in words
    "data": "data that came into",
    "given": "what was given to",
    "weight": "weight that was given to",
    "input cast": "cast of what came into",
    "output cast": "cast of the output of",
    "output cast backward": "cast of the gradient of the output of",
}


def place_of(trace: TraceRecord) -> str:
    """Name what a trace found: module, class, direction and, where it is known, the operation."""
    module = words.shown(trace.module or "the model itself")
    kind = f" ({words.shown(trace.type, 32)})" if trace.type else ""
    place = f"{_PHASES.get(trace.phase, f'{trace.phase} of')} {module}{kind}"
    if not trace.type and not trace.module:
        what = {"data": "value given", "given": "value given", "weight": "weight used"}
        phase = what.get(trace.phase, trace.phase)
        place = f"{phase} outside of all modules, such as in the loss function"
    operation, where = words.shown(trace.operation), words.shown(trace.where)
    return place + (f", in {operation}" if operation else "") + (f" at {where}" if where else "")


def first_parameters(overflow: OverflowRecord) -> str:
    """Name the parameter whose gradient came first, or, if that is not known, those that may."""
    names = [words.shown(name) for name in overflow.parameters[: min(overflow.candidates, 2)]]
    return " or ".join([*names, *(["another"] if overflow.candidates > 2 else [])])


def gradient_overflows(run: Run) -> list[OverflowRecord]:
    """Overflows of skipped steps that began in a backward, after the search for a first scale."""
    taken = {
        steps[0].optimizer: steps[_searching(steps) - 1].step
        for steps, _ in run.by_optimizer()
        if steps[0].skipped
    }
    found = _of_gradients(run)
    if not run.steps:  # only overflows are recorded: those of the search are the first steps
        found = [o for i, o in enumerate(found, 1) if o.step != i]
    return [o for o in found if o.step > taken.get(o.optimizer, 0)]


def _of_gradients(run: Run) -> list[OverflowRecord]:
    return [o for o in run.overflows if o.loss_was_finite and o.was_skipped]


def _places(overflows: Sequence[OverflowRecord]) -> list[tuple[str, list[OverflowRecord]]]:
    """Overflows by where they began, the most frequent place first."""
    found: dict[str, list[OverflowRecord]] = {}
    for overflow in overflows:
        if overflow.trace is not None:
            found.setdefault(place_of(overflow.trace), []).append(overflow)
        elif overflow.parameters:
            place = f"gradient of {first_parameters(overflow)}"
            found.setdefault(place, []).append(overflow)
    return sorted(found.items(), key=lambda item: -len(item[1]))


def overflows_at_any_scale(run: Run) -> Iterator[Finding]:
    """Yield gradients that overflow however small the loss scale is.

    That is so if they do at a scale of 1, or at its floor, or if a module makes nan of a small
    gradient.
    """
    floor = max(FLOOR, run.limit("min_loss_scale") or 0.0)
    causes = gradient_overflows(run) or _of_gradients(run)
    for place, found in _places(causes):
        low = [o for o in found if o.old_scale <= floor]
        made = [o.trace for o in found if o.trace is not None and _makes_nan(o.trace)]
        if not made and (not low or len(found) < SAME_PLACE):
            continue
        last = min(found, key=lambda o: o.old_scale)
        first = _row_to(found, last) if low else next(o for o in found if o.trace in made)
        kinds = Counter(o.trace.output_found if o.trace else next(iter(o.kinds), "") for o in found)
        kind = "nan" if kinds["nan"] > kinds["inf"] else "infinite"
        scales = words.scale(first.old_scale)
        if last.old_scale < first.old_scale:
            scales = f"every scale from {scales} down to {words.scale(last.old_scale)}"
        else:
            scales = f"a scale of {scales}"
        yield Finding(
            id="overflow-at-any-scale",
            title=f"Gradients become {kind} at any scale",
            number=f"In {words.counted(len(found), 'skipped step')}, at {scales}.{_input(found)}",
            do=_mend(run, found, kind),
            step=first.step,
            where=place,
            is_grave=True,
        )
        return


def _row_to(found: Sequence[OverflowRecord], last: OverflowRecord) -> OverflowRecord:
    """The first of the overflows that the scale fell by down to ``last``, without growth."""
    first = last
    for overflow in reversed(found[: found.index(last)]):
        if overflow.old_scale <= first.old_scale:
            break
        first = overflow
    return first


def _makes_nan(trace: TraceRecord) -> bool:
    form = FORMATS.get(trace.dtype)
    return (
        trace.phase == "backward"
        and trace.output_found == "nan"
        and form is not None
        and trace.input_max_abs is not None
        and trace.input_max_abs < form.largest * SMALL
    )


def _input(found: Sequence[OverflowRecord]) -> str:
    traces = [o.trace for o in found if o.trace is not None]
    largest = max((t.given_max_abs for t in traces if t.given_max_abs is not None), default=None)
    if largest is None:
        return ""
    return f" What went in reached {words.magnitude(largest)} at most."


def _mend(run: Run, found: Sequence[OverflowRecord], kind: str) -> str:
    trace = next((o.trace for o in found if o.trace), None)
    return look_at_zero(trace, in_float32(run, trace) if kind == "infinite" else "") + (
        "" if trace else ask_for_trace(run)
    )


def look_at_zero(trace: TraceRecord | None, cure: str = "") -> str:
    """Say what makes bad gradients of good ones; torch's norms have a number inside already."""
    if trace is not None and "norm" in f"{trace.type} {trace.operation}".lower():
        do = "Its eps keeps it from dividing by zero, so look at what goes in: it may be too large"
        return f"{do}, or nearly constant{cure}."
    do = "Unless there is one, add a small number inside of it, or mask its argument before it"
    return f"{_LOOK_AT_ZERO} {do}{cure}."


def in_float32(run: Run, trace: TraceRecord | None) -> str:
    """Say how to compute a module, or what it is in, in float32; nothing if that is no help."""
    what_if = None if trace is None else trace.float32
    if what_if is not None and what_if.found in ("inf", "nan"):
        return ""  # it was tried
    if run.half == "bfloat16" or (trace is not None and trace.dtype in ("float32", "bfloat16")):
        return ""
    level = run.start.opt_level if run.start else "O2"
    if trace is None or not trace.module:
        how = "compute it in float32"
    elif level == "O1":
        how = "compute it in float32: in its forward, with preamp.disable_casts(), on x.float()"
    else:
        name = words.shown(trace.module)
        if trace.module in run.kept:  # it was tried
            return f", and train in bfloat16 (O5): keep_fp32 of {name} did not help"
        how = f'compute it in float32, by keep_fp32="{name}" in preamp.initialize'
    return f", and {how}; or train in bfloat16 ({'O4' if level == 'O1' else 'O5'})"


def ask_for_trace(run: Run) -> str:
    """Say how to learn the module; nothing where that was asked for."""
    if run.is_traced:
        return ""
    return ' To learn the module, pass overflow="trace" to preamp.initialize.'


def overflows_in_one_place(run: Run) -> Iterator[Finding]:
    """Yield the module or parameter that most skipped steps begin in, if it is most of them.

    Skips before the first step that was taken are left out: the scale is still being found. So are
    as few as keeping a scale takes: those all begin in the parameter with the largest gradient.
    """
    causes = [o for o in gradient_overflows(run) if o.trace is not None or o.parameters]
    taken = sum(len(steps) - _searching(steps) for steps, _ in run.by_optimizer())
    for place, found in _places(causes)[:1]:
        is_usual = bool(run.steps) and not _are_many(len(causes), taken)
        if is_usual or len(found) < SAME_PLACE or 2 * len(found) <= len(causes):
            continue
        trace = found[0].trace
        cure = in_float32(run, trace)
        what = "large logits, a division by a small number, an exponential"
        do = f"Look at what {'it' if trace else 'its module'} computes ({what}){cure}."
        scales = [o.old_scale for o in found]
        yield Finding(
            id="overflow-in-one-place",
            title=f"Overflows keep beginning in the {place}",
            number=f"It came first in {len(found):,} of"
            f" {words.counted(len(causes), 'skipped step')}, at loss scales of"
            f" {_span(min(scales), max(scales))}.{_input(found)}",
            do=do if trace else do + ask_for_trace(run),
            step=found[0].step,
            where=place,
        )


def _span(low: float, high: float) -> str:
    return words.scale(low) if low == high else f"{words.scale(low)} to {words.scale(high)}"


def no_step_taken(run: Run) -> Iterator[Finding]:
    """Yield the optimizers that skipped all of their steps, not only for losses like nan."""
    by_loss = _skipped_by_loss(run)
    for steps, whose in run.by_optimizer():
        is_of_scale = any((s.optimizer, s.step) not in by_loss for s in steps)
        if _searching(steps) == len(steps) and is_of_scale:
            scales = [o.new_scale for o in run.overflows if o.optimizer == steps[0].optimizer]
            down = f" The scale came down to {words.scale(scales[-1])}." if scales else ""
            count = words.counted(len(steps), "step")
            yield Finding(
                id="no-step-taken",
                title="No step was taken",
                number=f"{count}{whose}, all of them skipped.{down}",
                do="The loss scale begins too high for so few steps: train for longer, or begin"
                " with a lower scale, by preamp.engine_of(optimizer).scaler(0).set_scale(...).",
                step=steps[0].step,
                where=_place_of_skips(run, steps),
            )


def _place_of_skips(run: Run, steps: Sequence[StepRecord]) -> str:
    """Where the skipped ones of some steps begin most often."""
    numbers = {step.step for step in steps if step.skipped}
    optimizer = steps[0].optimizer
    causes = [o for o in run.overflows if o.optimizer == optimizer and o.step in numbers]
    places = _places(causes)
    return places[0][0] if places else ""


def _skipped_by_loss(run: Run) -> set[tuple[int, int]]:
    """Optimizer and step of what was skipped because the loss itself was not finite."""
    found = {(o.optimizer, o.step) for o in run.overflows if not o.loss_was_finite}
    bad = (s for s in run.steps if not all(map(math.isfinite, s.losses.values())))
    return found | {(s.optimizer, s.step) for s in bad}


def many_skips(run: Run) -> Iterator[Finding]:
    """Yield the share of skipped steps, beyond what finding a scale and keeping it takes.

    Skips before the first step that was taken are left out: the scale is still being found. So are
    those whose loss was not finite, which is another matter.
    """
    by_loss = _skipped_by_loss(run)
    for steps, whose in run.by_optimizer():
        rest = steps[_searching(steps) :]
        skipped = [s for s in rest if s.skipped and (s.optimizer, s.step) not in by_loss]
        if _are_many(len(skipped), len(rest)):
            since = " from the first that was taken" if len(rest) < len(steps) else ""
            part = words.share(len(skipped) / len(rest))
            yield Finding(
                id="many-skips",
                title="Many steps were skipped",
                number=f"{len(skipped):,} of {words.counted(len(rest), 'step')}{whose}{since}:"
                f" {part}. Keeping a scale takes about one in 2,000.",
                do="Gradients vary more than the scale can follow. Clip them, lower the learning"
                f" rate, or train in bfloat16 (O4, O5).{_schedule(steps)}",
                step=skipped[0].step,
                where=_place_of_skips(run, skipped),
            )


def _are_many(skipped: int, steps: int) -> bool:
    """Whether more of the steps after the search were skipped than keeping a scale takes."""
    is_half = skipped >= SKIPPED_SPARE and 2 * skipped >= steps
    return is_half or skipped > max(SKIPPED_SPARE, SKIPPED_SHARE * steps)


def skips_in_a_row(run: Run) -> Iterator[Finding]:
    """Yield the longest row of skipped steps of an optimizer that has taken others.

    The row that a run begins with is told of, too, where it is most of the run.
    """
    by_loss = _skipped_by_loss(run)
    for steps, whose in run.by_optimizer():
        counts = [s.skipped and (s.optimizer, s.step) not in by_loss for s in steps]
        groups = groupby(zip(counts, steps, strict=True), lambda pair: pair[0])
        rows = [[step for _, step in row] for skipped, row in groups if skipped]
        longest = max(rows, key=len, default=list[StepRecord]())
        is_search = longest[:1] == steps[:1] and 1 < len(longest) >= len(steps) / 2
        if len(longest) < len(steps) and (is_search or len(longest) >= SKIPS_IN_ROW):
            yield Finding(
                id="skips-in-a-row",
                title="Many steps in a row were skipped",
                number=f"{words.counted(len(longest), 'step')}{whose} in a row, up to step"
                f" {longest[-1].step:,}.",
                do=f"{_end_search(steps, longest)}{_schedule(steps)}",
                step=longest[0].step,
                where=_place_of_skips(run, longest),
            )


def _end_search(steps: Sequence[StepRecord], longest: Sequence[StepRecord]) -> str:
    if longest[0] is not steps[0]:
        return "Gradients grow faster than the scale can follow: lower the learning rate, or clip."
    end = next(iter(steps[len(longest)].scales.values()), 1.0)
    return (
        f"The loss scale began too high. Begin at {words.scale(end)}, by"
        " preamp.engine_of(optimizer).scaler(0).set_scale(...)."
    )


def _searching(steps: Sequence[StepRecord]) -> int:
    """How many steps were skipped before the first that was taken."""
    return next((i for i, step in enumerate(steps) if not step.skipped), len(steps))


def _schedule(steps: Sequence[StepRecord]) -> str:
    """Say how to keep a schedule of the learning rate from counting skipped steps, if it does."""
    do = "preamp.step_scheduler(scheduler, optimizer) in place of scheduler.step()"
    if any(step.lr is None for step in steps):
        return f" If a schedule of the learning rate goes on at each step, call {do}."
    went_on = sum(a.skipped and a.lr != b.lr for a, b in pairwise(steps))
    if not went_on:
        return ""
    times = words.counted(went_on, "skipped step")
    return f" The schedule of the learning rate went on after {times}: call {do}."


def skips_section(run: Run, prefix: str) -> Section:
    """Make the part about the loss scale and skipped steps; ``prefix`` is of all ids."""
    blocks = list[Block]()
    values = {value for points in run.scales().values() for _, value in points}
    if len(values) > 1:
        text = "It halves at each overflow and doubles after a row of steps without one."
        drawn = scale_picture(run, f"{prefix}-scale")
        blocks.append(Figure(title="Loss scale by step", body=drawn, caption=text))
    elif values:
        blocks.append(Text(text=f"The loss scale is {words.scale(*values)} in all steps."))
    listed = _tables(run, prefix)
    title, lead = "Loss scale and skipped steps", ""
    if listed:
        lead = (
            "A step is skipped when a gradient is infinite or not a number; the loss scale then"
            " falls."
        )
        if any(not overflow.was_skipped for overflow in run.overflows):
            lead, title = f"{lead} At a static one it is taken all the same.", "Overflows"
        lead += " Named is the parameter whose gradient was the first, in the order of the backward"
    blocks += listed or [Text(text="No step was skipped.")]
    return Section(name=prefix, title=title, lead=f"{lead}." if lead else "", blocks=blocks)


def _tables(run: Run, prefix: str) -> list[Table]:
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
    rows = [
        [f"{step:,}", *([str(index)] if has_several else []), *_cause(causes.get((step, index)))]
        for step, index in listed
    ]
    table = Table(
        name=f"{prefix}-list",
        caption=caption,
        columns=(*numbers, "cause", "first in", "trace"),
        numbers=numbers,
        wide=("first in", "trace"),
        rows=rows,
    )
    return [table] if len(listed) == len(steps) else [table, _by_cause(run, prefix)]


def _what(run: Run) -> str:
    """What overflows did: at a static scale the step is taken all the same."""
    return "skipped step" if all(o.was_skipped for o in run.overflows) else "overflow"


def _cause(overflow: OverflowRecord | None) -> list[str]:
    if overflow is None:
        return [words.MISSING, "not recorded", words.MISSING, words.MISSING]
    old, new = words.scale(overflow.old_scale), words.scale(overflow.new_scale)
    return [f"{old} → {new}", _kind(overflow), _first(overflow), _trace(overflow.trace)]


def _kind(overflow: OverflowRecord) -> str:
    loss = f" (loss {overflow.loss_id})" if overflow.loss_id else ""
    if not overflow.loss_was_finite:
        return f"the loss itself was not finite{loss}"
    return f"gradient is {overflow.kinds[0] if overflow.kinds else 'inf or nan'}{loss}"


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
        columns=("first in", "cause", "steps"),
        numbers=("steps",),
        wide=("first in",),
        rows=rows,
    )
