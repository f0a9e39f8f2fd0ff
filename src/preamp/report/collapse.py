# SPDX-License-Identifier: BSD-3-Clause
"""When the loss of a run stopped being finite, and what the records tell of the cause."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

from preamp.numerics import FORMATS, OverflowRecord, TraceRecord, is_eps_zero
from preamp.report import words
from preamp.report.finding import Finding, named
from preamp.report.gather import Run, gradients_of
from preamp.report.losses import (
    RISE,
    Point,
    Turn,
    diverges,
    finite_of,
    first_turn,
    losses_jump,
    rewritten,
    rise_of,
    went_on,
)
from preamp.report.skips import (
    ask_for_trace,
    in_float32,
    look_at_zero,
    overflows_at_any_scale,
    place_of,
)

LARGE_UPDATE: Final = 10.0  # a weight that one update moves by so much is thrown away
BEYOND: Final = 16.0  # times the largest float16, from which a scale is too large for any gradient
NEAR: Final = 2.0**-5  # part of the largest float16 that others reach where a scale is too large
EARLY: Final = 3  # steps in which an eps of zero breaks most runs
LISTED: Final = 6  # steps that are named one by one


class Cause(Enum):
    """What made the loss infinite or nan."""

    EPS = auto()  # the optimizer divides by zero
    SCALE = auto()  # a static loss scale let gradients overflow into the weights
    GRADIENT = auto()  # gradients of a finite loss were infinite or nan, and the step was taken
    RATE = auto()  # the training diverged
    CHANGE = auto()  # the loss had jumped before
    MODULE = auto()  # the forward of a module, which a trace names
    UNKNOWN = auto()  # data, model or loss function


@dataclass(frozen=True, slots=True, kw_only=True)
class Collapse:
    """A loss that is not finite."""

    cause: Cause
    loss: str  # its name
    loss_id: int  # which loss
    bad: Sequence[int]  # its steps, or those of weights, that are not finite
    before: Sequence[Point]  # the finite losses before, with their steps
    after: int  # how many losses were finite again later
    overflows: Sequence[OverflowRecord]  # what is known of its steps
    gradients: Sequence[str]  # names of those that were infinite or nan before it
    step: int  # at which it began
    broken: Turn | None = None  # where the loss turned for the worse before


def collapse(run: Run) -> Collapse | None:
    """Return the first loss of a run that is not finite, and its cause; ``None`` if all are.

    Weights that overflowing gradients went into count as well, although no loss came after them.
    """
    rows = run.losses() or {"0": []}
    early = [o for o in run.overflows if not o.loss_was_finite]
    bad = {
        name: [step for step, loss in row if not math.isfinite(loss)] for name, row in rows.items()
    }
    name = min(rows, key=lambda name: bad[name][0] if bad[name] else math.inf)
    steps = sorted({*bad[name], *(o.step for o in early)})
    row, end = rows[name], steps[0] if steps else math.inf
    before = [point for point in finite_of(row) if point[0] < end]
    after = sum(step > end for step, _ in finite_of(row))
    overflown = _overflown(run, end) if run.static_scale else None
    broken = first_turn(run, overflown[0] if overflown else end)
    if broken is not None and (overflown or (steps and (broken.cause or not after))):
        cause, step = Cause.RATE if broken.cause else Cause.CHANGE, broken.step
    elif overflown is not None:
        cause, step = _cause_of_overflow(run, overflown[0]), overflown[0]
    elif steps:
        cause, step = _cause(run, steps[0], before, early, comes_back=after > 0)
    else:
        return None
    return Collapse(
        cause=cause,
        step=step,
        broken=broken if cause in (Cause.RATE, Cause.CHANGE) else None,
        gradients=() if overflown is None else overflown[1],
        loss=name,
        loss_id=int(name.partition(" ")[0]),
        bad=steps,
        before=before,
        after=after,
        overflows=early,
    )


def _cause_of_overflow(run: Run, step: int) -> Cause:
    """The cause of gradients that overflowed into the weights at a step with a static scale."""
    seen = gradients_of(r for r in run.numerics if r.step == step)
    # Where all that is left lies far below the format's end, it was not the scale that went beyond.
    largest = max((t.max_abs for t in seen if t.max_abs > 0), default=math.inf)
    is_near = largest > NEAR * FORMATS["float16"].largest
    is_scaled = (run.static_scale or 0) > 1 and run.half == "float16" and is_near
    return Cause.SCALE if is_scaled else Cause.GRADIENT


def _cause(
    run: Run,
    bad: int,
    before: Sequence[Point],
    early: Sequence[OverflowRecord],
    *,
    comes_back: bool,
) -> tuple[Cause, int]:
    """The cause of a loss that is not finite at step ``bad``, and the step it began at."""
    last = before[-1][0] if before else 0  # the update of this step came before the first bad loss
    given = ("data", "given")
    if any(o.step == bad and o.trace is not None and o.trace.phase in given for o in early):
        return Cause.MODULE, bad
    rise = rise_of(before) or _fall_of(before)
    if rise is not None and not comes_back:
        return Cause.RATE, rise[2]
    if last and _throws_away(run, last):
        return Cause.RATE, bad
    if last and zero_eps(run) and (bad <= EARLY or _weights_broke(run, bad)):
        return Cause.EPS, last
    too_large = BEYOND * FORMATS["float16"].largest
    if last and run.half == "float16" and (run.static_scale or 0.0) > too_large:
        return Cause.SCALE, last
    if any(_told(o) is not None for o in early):
        return Cause.MODULE, bad
    return Cause.UNKNOWN, bad


def _fall_of(points: Sequence[Point]) -> tuple[float, float, int] | None:
    """What `rise_of` tells of losses that fall below zero, most of the way at the end.

    That of a likelihood falls below zero too, but ever more slowly.
    """
    losses = [loss for _, loss in points]
    rest = losses[: -max(1, len(losses) // 4)]
    is_faster = bool(rest) and rest[-1] - losses[-1] > RISE * (max(rest) - rest[-1])
    return rise_of([(step, -loss) for step, loss in points]) if is_faster else None


def _overflown(run: Run, end: float) -> tuple[int, list[str]] | None:
    """The first step up to ``end`` that was taken with gradients that overflowed, and these.

    Their loss was finite. They come in the order of the backward, where that is known.
    """
    finite = {(s.step, i) for s in run.steps for i, loss in s.losses.items() if math.isfinite(loss)}
    seen = [
        (record.step, [t.name for t in reversed(gradients_of([record])) if t.nonfinite])
        for record in run.numerics
        if (record.step, record.loss_id) in finite
    ]
    told = [
        (o.step, o.parameters) for o in run.overflows if o.loss_was_finite and not o.was_skipped
    ]
    found = [(step, names) for step, names in (*told, *seen) if names and step <= end]
    return min(found, key=lambda pair: pair[0], default=None)


def _throws_away(run: Run, last: int) -> bool:
    """Whether the update before the first bad loss moved a weight far beyond what weights are."""
    rate = next((s.lr for s in run.steps if s.step == last and s.lr is not None), 0.0)
    adapts = any("eps" in options for options in _optimizers(run))
    gradients = [t for r in run.numerics if r.step == last for t in gradients_of([r])]
    largest = max((t.max_abs / t.scale for t in gradients), default=0.0)
    return rate * (1.0 if adapts else largest) > LARGE_UPDATE


def _optimizers(run: Run) -> list[dict[str, str]]:
    return run.start.optimizers if run.start else []


def zero_eps(run: Run) -> dict[str, str] | None:
    """The options of the first optimizer whose eps is zero in the float16 weights it updates."""
    if run.start is None or run.has_masters or "float16" not in run.start.dtypes.values():
        return None
    for options in _optimizers(run):
        is_fused = options.get("class", "").startswith("Fused")
        if not is_fused and is_eps_zero(options, FORMATS["float16"]):
            return options
    return None


def _weights_broke(run: Run, first: int) -> bool:
    """Whether weights were seen to be nan before the loss was, from gradients that were finite."""
    return any(
        t.what == "weight" and t.nonfinite
        for r in run.numerics
        if r.step < first
        for t in r.tensors
    )


# -- what the rules say of it ----------------------------------------------------------------


def broken_runs(run: Run) -> Iterator[Finding]:
    """Yield what broke a run, or may yet.

    What changed before a break explains it, so the break itself is told of beside it, not instead.
    """
    found, stuck = collapse(run), next(overflows_at_any_scale(run), None)
    cause = None if found is None else found.cause
    broken = None if found is None else found.broken
    ends = [(found.step, f"the loss {_lost(found)}")] if found is not None and found.bad else []
    fallen = found and cause is Cause.RATE and (found.loss, found.before, found.step)
    if stuck is not None:
        ends.append((stuck.step, f"{_now(stuck)} from step {stuck.step:,} on"))
        turned = first_turn(run, stuck.step)
        if turned is not None or cause is None:
            broken, fallen = turned, fallen or _climb(run, stuck.step)
    end = f", and {min(ends)[1]}" if ends else ""
    written = rewritten(run)
    if written is not None and broken is not None and broken.step < written.step:
        written = None
    if written is not None:
        yield replace(written, is_grave=bool(ends))
    yield from _eps_is_zero(run, found if cause is Cause.EPS else None)
    yield from diverges(run, broken, fallen or None, end)
    yield from losses_jump(run, broken, end)
    if broken or fallen or written or cause is Cause.EPS:
        return
    if found is not None:
        yield _not_finite(run, found)
    if stuck is not None:
        yield stuck


def _now(stuck: Finding) -> str:
    return stuck.title.replace("Gradients become", "gradients are")


def _climb(run: Run, end: int) -> tuple[str, Sequence[Point], int] | None:
    """The name, finite losses and first step of a loss that rose by and by to a step."""
    for name, row in run.losses().items():
        before = [point for point in finite_of(row) if point[0] < end]
        if rise := rise_of(before):
            return name, before, rise[2]
    return None


def _eps_is_zero(run: Run, found: Collapse | None) -> Iterator[Finding]:
    """Yield an optimizer whose eps is zero in float16, where that broke the run or may yet."""
    options = zero_eps(run)
    if options is None:
        return
    count = _not_finite_at(run, found.step) if found else ""
    broken = f" {count} were infinite or nan after it." if count else ""
    name = words.shown(options.get("class", "the optimizer"), 40)
    fate = "turned weights into nan" if found else "divides by zero in float16"
    yield Finding(
        id="eps-is-zero",
        title=f"The eps of {name} {fate}",
        number=f"Its eps is {words.magnitude(float(options['eps']))}, which float16 rounds to zero,"
        " so weights with a gradient of zero are divided by zero."
        + (f"{broken}{_then(found)}" if found else ""),
        do=f"Pass eps=1e-4 to {name}, or update float32 masters (O2), which keep small updates.",
        step=found.step if found else min((s.step for s in run.steps), default=0),
        where=f"update of float16 weights by {name}",
        is_grave=found is not None,
    )


def _not_finite_at(run: Run, step: int) -> str:
    tensors = [t for r in run.numerics if r.step == step for t in r.tensors if t.what == "weight"]
    count = sum(t.nonfinite for t in tensors)
    return f"{count:,} of {sum(t.elements for t in tensors):,} weights" if count else ""


def _not_finite(run: Run, found: Collapse) -> Finding:
    """Tell what broke the loss or the weights, if it was neither the learning rate nor an eps."""
    tell = {Cause.MODULE: _by_module, Cause.UNKNOWN: _by_elimination}.get(found.cause, _by_gradient)
    step, where, title, number, do = tell(run, found)
    return Finding(id="loss-not-finite", title=title, number=number, do=do, step=step, where=where)


Told = tuple[int, str, str, str, str]  # step, place, title, numbers, what to do

_FORWARD: Final = {  # what became infinite or nan, and what to do, by the phase of a trace
    "forward": ("The forward of {module} makes {found}", "Bound what it computes{cure}."),
    "data": (
        "What {module} is given holds {found}",
        "Look at the data of step {step} first, and mask or drop such values. If it holds none,"
        " look at what numpy or lists lead to it.",
    ),
    "given": (
        "What {module} is given holds {found}",
        "Look at the data of step {step} first, then at what is computed outside of the models or"
        " kept from one step to the next.",
    ),
    "weight": (
        "A weight that {module} uses holds {found}",
        "Look at what writes to it, and at the file that it was loaded from.",
    ),
    "input cast": ("The data become {found} in {dtype}", "Normalise the data{cure}."),
    "output cast": ("The output of {module} becomes {found} in {dtype}", "Bound it{cure}."),
}


def _told(overflow: OverflowRecord) -> TraceRecord | None:
    """What a trace tells of a forward."""
    trace = overflow.trace
    return trace if trace is not None and trace.phase in _FORWARD else None


def _by_module(run: Run, found: Collapse) -> Told:
    told = [(o.step, trace) for o in found.overflows if (trace := _told(o)) is not None]
    places = Counter(place_of(trace) for _, trace in told)
    # Without skips the first bad value stays in the weights, and all modules follow.
    place = places.most_common(1)[0][0] if run.is_dynamic else place_of(told[0][1])
    step, trace = next((step, trace) for step, trace in told if place_of(trace) == place)
    values = {"found": trace.output_found, "dtype": trace.dtype, "cure": in_float32(run, trace)}
    module = trace.module or ("the model itself" if trace.type else "the loss function")
    values |= {"module": words.shown(module), "step": f"{step:,}"}
    title, do = (text.format(**values) for text in _FORWARD[trace.phase])
    most, what_if = trace.given_max_abs, ""
    if trace.float32 is not None:
        what_if = f" {words.shown(trace.float32.told(trace.dtype), words.SENTENCE_LIMIT)}"
    number = (
        f"{_steps(run, found)} The first bad value came from there in {places[place]:,} of"
        f" {words.counted(len(told), 'traced step')}: {trace.output_found} in {trace.dtype}"
        + ("." if most is None else f", from an input up to {words.magnitude(most)}.")
        + what_if
    )
    if found.before and not found.after and run.is_dynamic and trace.phase == "forward":
        do += (
            f" It was well up to step {found.before[-1][0]:,}, so look at what changed then: the"
            " data, or weights that the script wrote to."
        )
    return step, place, title, number, f"No loss scale changes that. {do}"


def _by_gradient(run: Run, found: Collapse) -> Told:
    scale = words.scale(run.static_scale or 1.0)
    title = "The backward of a finite loss makes inf or nan"
    do = f"{look_at_zero(None)} A dynamic loss scale skips such steps.{ask_for_trace(run)}"
    if found.cause is Cause.SCALE:
        title = f"A static loss scale of {scale} is too large"
        do = (
            'A smaller scale can help: pass loss_scale="dynamic", which finds one, and skips steps'
            " whose gradients overflow."
        )
    where = f"gradient of {named(found.gradients)}" if found.gradients else "the first update"
    what = f"{words.counted(len(found.gradients), 'gradient')} held infinite or nan values"
    if not found.gradients:
        what = "The largest float16, 65,504, is below the scale itself: gradients overflow"
    number = f"{what} at step {found.step:,}, and the step was taken all the same.{_then(found)}"
    return found.step, where, title, number, do


def _then(found: Collapse) -> str:
    return f" The loss {_lost(found)}." if found.bad else ""


def _lost(found: Collapse) -> str:
    first = f"step {found.bad[0]:,}"
    return f"is not finite at {first}" if found.after else f"is not finite from {first} on"


def _by_elimination(run: Run, found: Collapse) -> Told:
    bad = set(found.bad)
    finite = [
        r.step
        for r in run.numerics
        if r.step in bad
        and r.loss_id == found.loss_id
        and gradients_of([r])
        and not any(t.nonfinite for t in gradients_of([r]))
    ]
    traced = run.is_traced or any(o.trace is not None for o in found.overflows)
    if finite:
        where = "the loss function"
        do = (
            f"Look at the loss function: the gradients of step {finite[0]:,} are finite, so what is"
            " infinite in the loss does not depend on the weights. A logarithm of zero, a division"
            " by an empty mask, a constant?"
        )
    elif traced:
        where = "the data, or the loss function outside of the modules"
        do = (
            f"Look at the data of step {found.bad[0]:,} for nan and inf, and at the loss function:"
            " no module made the bad value from finite ones."
        )
    else:
        where, do = _untraced(run, found)
    number = f"{_steps(run, found)}{_last_finite(run, found)}{went_on(run, found.step)}"
    return found.bad[0], where, "The loss is infinite or nan", number, do


def _untraced(run: Run, found: Collapse) -> tuple[str, str]:
    first = found.bad[0]
    half = f", values too large for {run.half}" if run.half == "float16" else ""
    if found.after:
        where = "single batches"
        do = f"Look at the data of {_listed(found.bad)} for nan, inf, empty masks{half}."
    elif run.is_dynamic:
        where = "the forward, the data or the loss function"
        do = (
            f"No update has changed the weights since step {first:,}, and each forward fails."
            f" Look at what changed there: the data, the loss function{half}, or weights that the"
            " script wrote to."
        )
    elif found.before and not any(r.step == found.before[-1][0] for r in run.numerics):
        last = found.before[-1][0]
        where = f"the data of step {first:,}, or the update of step {last:,}"
        do = (
            f"Nothing recorded tells whether the data of step {first:,} or the gradients of step"
            f" {last:,} are to blame: numerics_every=1 would. A dynamic loss scale skips both."
        )
    else:
        where = f"the batch of step {first:,}, and from then on all weights"
        do = (
            f"Look at the data of step {first:,}: its gradients went into the weights, and all"
            " later losses follow. A dynamic loss scale skips such steps."
        )
    return where, do + ask_for_trace(run)


def _last_finite(run: Run, found: Collapse) -> str:
    if not found.before:
        return " No loss before was finite." if run.steps else ""
    step, loss = found.before[-1]
    return f" It was {words.magnitude(loss)} at step {step:,}."


def _steps(run: Run, found: Collapse) -> str:
    skipped = sum(o.was_skipped for o in found.overflows) if run.steps else 0
    of_them = "all of them" if skipped == len(found.bad) else f"{skipped:,} of them"
    of_them = "which was" if len(found.bad) == 1 else of_them
    return f"In {_listed(found.bad)}{f', {of_them} skipped' if skipped else ''}."


def _listed(steps: Sequence[int]) -> str:
    """Name some steps: all, or the first and the last."""
    if len(steps) == 1:
        return f"step {steps[0]:,}"
    if len(steps) > LISTED:
        return f"{len(steps):,} steps from {steps[0]:,} to {steps[-1]:,}"
    return f"steps {', '.join(f'{step:,}' for step in steps[:-1])} and {steps[-1]:,}"
