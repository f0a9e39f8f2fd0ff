# SPDX-License-Identifier: BSD-3-Clause
"""Losses as far as scales and skips need them: what ran away, and what is infinite or nan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median_low
from typing import Final

from preamp.numerics import FORMATS, OverflowRecord, TensorStatistics, TraceRecord
from preamp.report import words
from preamp.report.finding import Finding, named
from preamp.report.gather import Point, Run, gradients_of
from preamp.report.skips import ask_for_trace, in_float32, look_at_zero, place_of

RISE: Final = 3.0  # how far a loss may end above where it began, in units of what it began with
RISE_WINDOW: Final = 5  # losses at either end whose median is taken, where there are enough
EXPLODES: Final = 100.0  # times that a loss grows, or all gradients together between two looks
LARGE_UPDATE: Final = 10.0  # a weight that one update moves by so much is thrown away
BEYOND: Final = 16.0  # times the largest float16, from which a scale is too large for any gradient
NEAR: Final = 2.0**-5  # part of the largest float16 that others reach where a scale is too large


def finite_of(points: Sequence[Point]) -> list[Point]:
    """The losses that are finite, with their steps."""
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


def diverges(run: Run) -> Iterator[Finding]:
    """Yield the first loss that ran away, or what grew beyond all measure before it was not finite.

    A loss that rises while neither weights nor gradients grow is only noted: a critic learns, or
    the data become harder.
    """
    for name, row in run.losses().items():
        finite = finite_of(row)
        is_broken = not math.isfinite(row[-1][1])
        since = [rise_of(finite, 1 if is_broken else RISE_WINDOW)]
        since += [_thrown_away(run, row), _exploded(finite)] if is_broken else []
        since += [_burst(run)] if is_broken or row[-1][1] > row[0][1] else []
        step = min((step for step in since if step), default=0)
        taken = _overflown(run)
        if not step or not finite or (taken is not None and taken[0] <= step):  # that broke it
            continue
        times, what = _growth(run, step) or (math.inf, "")
        is_worse = is_broken or times > RISE
        course = [words.magnitude(y) for _, y in (finite[0], finite[-1])]
        told = f"went from {course[0]} to {course[1]}" if len(finite) > 1 else f"was {course[0]}"
        told += f", and is not finite from step {_lost_at(row):,} on" if is_broken else ""
        grew = f" {what} grew {words.magnitude(times)}-fold." if what and times > RISE else ""
        yield Finding(
            id="diverges" if is_worse else "loss-rises",
            title="Training diverges" if is_worse else "A loss rises",
            number=f"Loss {name} {told}.{grew}{_rate_at(run, step)}",
            do="Unless the loss is meant to rise, lower the learning rate, warm it up, or clip. If"
            f" it was well before, look at what changed at step {step:,}: the rate, the data, what"
            " the script wrote to weights.",
            step=step,
            where=f"loss {name}",
            is_grave=is_broken,
        )
        return


def rise_of(points: Sequence[Point], last: int = RISE_WINDOW) -> int:
    """Since which step losses lie far above what they began with; 0 if they do not.

    They do if the median of the ``last`` ones does, or half of the last quarter.
    """
    width = max(1, min(RISE_WINDOW, len(points) // 4))
    first = [y for _, y in points[:width]]
    unit = max(map(abs, first), default=0.0)
    if not unit:
        return 0
    limit = median_low(first) + RISE * unit
    quarter = points[-max(1, len(points) // 4) :]
    ends = [points[-min(width, last) :], quarter]
    if all(median_low([y for _, y in end]) <= limit for end in ends):
        return 0
    above = [step for step, loss in points if loss > limit]
    calm = [step for step, loss in points[:-width] if loss <= limit and step < quarter[0][0]]
    since = [step for step in above if not calm or step > calm[-1]]
    return (since or above)[0]


def _burst(run: Run) -> int:
    """The look at which all gradients or weights together are many times what they were; or 0."""
    for what in ("gradient", "weight"):
        looks = [(r.step, [t for t in r.tensors if t.what == what]) for r in run.numerics]
        sizes = [(step, _size(tensors)) for step, tensors in looks if tensors]
        for (_, old), (step, new) in pairwise(sizes):
            if new > EXPLODES * old > 0:
                return step
    return 0


def _exploded(points: Sequence[Point]) -> int:
    """The first loss many times the very first, if the last is, too; or 0.

    A loss that explodes in its first steps leaves no calm ones to compare it with.
    """
    limit = EXPLODES * abs(points[0][1]) if points else 0.0
    if not limit or abs(points[-1][1]) <= limit:
        return 0
    return next(step for step, loss in points if abs(loss) > limit)


def _thrown_away(run: Run, row: Sequence[Point]) -> int:
    """The first bad loss, where the update before moved a weight beyond what weights are; or 0."""
    last = next((step for step, loss in reversed(row) if math.isfinite(loss)), 0)
    rate = next((s.lr for s in run.steps if s.step == last and s.lr is not None), 0.0)
    gradients = gradients_of(r for r in run.numerics if r.step == last)
    largest = max((t.max_abs / t.scale for t in gradients), default=0.0)
    adapts = any("eps" in options for options in (run.start.optimizers if run.start else ()))
    return last + 1 if last and rate * (1.0 if adapts else largest) > LARGE_UPDATE else 0


def _growth(run: Run, step: int) -> tuple[float, str] | None:
    """What grew most since the looks before a step: a gradient, or all weights together.

    ``None`` where nothing was looked at on either side.
    """
    first: dict[str, float] = {}
    grown: list[tuple[float, str]] = []
    for record in run.numerics:
        sizes = {
            f"The gradient of {words.shown(t.name)}": _size([t]) for t in gradients_of([record])
        }
        sizes["The size of all weights"] = _size([t for t in record.tensors if t.what == "weight"])
        if record.step < step:
            first |= sizes
        else:
            grown += ((size / first[what], what) for what, size in sizes.items() if first.get(what))
    return max(grown, default=None)


def _size(tensors: Sequence[TensorStatistics]) -> float:
    """The Euclidean norm of all of them together, without the loss scale."""
    return math.hypot(*(t.rms / t.scale * math.sqrt(t.elements) for t in tensors))


def _rate_at(run: Run, step: int) -> str:
    rates = [s.lr for s in run.steps if s.lr is not None and s.step <= step]
    return f" The learning rate is {words.magnitude(rates[-1])}." if rates else ""


def _lost_at(row: Sequence[Point]) -> int:
    """The first of the last losses that are not finite."""
    return next((step for step, loss in reversed(row) if math.isfinite(loss)), 0) + 1


def overflows_taken(run: Run) -> Iterator[Finding]:
    """Yield the first step that a static scale let go on with gradients that had overflowed."""
    scale = run.static_scale
    found = _overflown(run)
    is_beyond = run.half == "float16" and (scale or 0.0) > BEYOND * FORMATS["float16"].largest
    bad = [step for row in run.losses().values() for step, y in row if not math.isfinite(y)]
    if found is None and not (is_beyond and bad):
        return
    step, names = found or (min(bad), [])
    title = "The backward of a finite loss makes inf or nan"
    do = f"{look_at_zero(None)} A dynamic loss scale skips such steps.{ask_for_trace(run)}"
    if not names or _is_of_scale(run, step):
        title = f"A static loss scale of {words.scale(scale or 1.0)} is too large"
        do = (
            'A smaller scale can help: pass loss_scale="dynamic", which finds one, and skips steps'
            " whose gradients overflow."
        )
    what = f"{words.counted(len(names), 'gradient')} held infinite or nan values at step {step:,}"
    if not names:
        what = "The largest float16, 65,504, is far below the scale itself: gradients overflow"
    lost = f" The loss is not finite from step {min(bad):,} on." if bad else ""
    yield Finding(
        id="overflow-taken",
        title=title,
        number=f"{what}, and the step was taken all the same.{lost}",
        do=do,
        step=step,
        where=f"gradient of {named(names)}" if names else "",
    )


def _overflown(run: Run) -> tuple[int, list[str]] | None:
    """The first step that was taken with gradients that overflowed, in the backward's order.

    Their loss was finite. ``None`` at a dynamic scale.
    """
    if run.static_scale is None:
        return None
    finite = {(s.step, i) for s in run.steps for i, loss in s.losses.items() if math.isfinite(loss)}
    seen = [
        (record.step, [t.name for t in reversed(gradients_of([record])) if t.nonfinite])
        for record in run.numerics
        if (record.step, record.loss_id) in finite
    ]
    told = [
        (o.step, o.parameters) for o in run.overflows if o.loss_was_finite and not o.was_skipped
    ]
    return min(((s, n) for s, n in (*told, *seen) if n), key=lambda pair: pair[0], default=None)


def _is_of_scale(run: Run, step: int) -> bool:
    """Whether others came near the end of float16, too, so that the scale lifted them there."""
    seen = gradients_of(r for r in run.numerics if r.step == step)
    largest = max((t.max_abs for t in seen if t.max_abs > 0), default=math.inf)
    is_near = largest > NEAR * FORMATS["float16"].largest
    return run.half == "float16" and (run.static_scale or 0.0) > 1 and is_near


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


def loss_not_finite(run: Run) -> Iterator[Finding]:
    """Yield losses that are infinite or nan, and the module that makes them if it is known."""
    early = [o for o in run.overflows if not o.loss_was_finite]
    rows = run.losses().values()
    bad = {step for row in rows for step, loss in row if not math.isfinite(loss)}
    steps = sorted(bad | {o.step for o in early})
    if not steps:
        return
    last = [point for row in rows for point in finite_of(row) if point[0] < steps[0]][-1:]
    was = "".join(f" It was {words.magnitude(y)} at step {x:,}." for x, y in last)
    skipped = sum(o.was_skipped for o in early)
    of_them = f", {skipped:,} of them skipped" if skipped else ""
    number = f"In {words.counted(len(steps), 'step')} from {steps[0]:,} on{of_them}.{was}"
    told = [(o, o.trace) for o in early if o.trace is not None and o.trace.phase in _FORWARD]
    if told:
        yield _by_module(run, number, told)
        return
    traced = run.is_traced or any(o.trace is not None for o in early)
    yield Finding(
        id="loss-not-finite",
        title="The loss is infinite or nan",
        number=number,
        do=f"No loss scale changes that. Look at the data of step {steps[0]:,}, and at the loss"
        f" function{': no module made it' if traced else ''}.{ask_for_trace(run)}",
        step=steps[0],
    )


def _by_module(
    run: Run, number: str, told: Sequence[tuple[OverflowRecord, TraceRecord]]
) -> Finding:
    places = Counter(place_of(trace) for _, trace in told)
    # Without skips the first bad value stays in the weights, and all modules follow.
    place = places.most_common(1)[0][0] if run.is_dynamic else place_of(told[0][1])
    step, trace = next((o.step, trace) for o, trace in told if place_of(trace) == place)
    module = trace.module or ("the model itself" if trace.type else "the loss function")
    values = {"found": trace.output_found, "dtype": trace.dtype, "cure": in_float32(run, trace)}
    values |= {"module": words.shown(module), "step": f"{step:,}"}
    title, do = (text.format(**values) for text in _FORWARD[trace.phase])
    most, what_if = trace.given_max_abs, ""
    if trace.float32 is not None:
        what_if = f" {words.shown(trace.float32.told(trace.dtype), words.SENTENCE_LIMIT)}"
    return Finding(
        id="loss-not-finite",
        title=title,
        number=f"{number} The first bad value came from there in {places[place]:,} of"
        f" {words.counted(len(told), 'traced step')}: {trace.output_found} in {trace.dtype}"
        + ("." if most is None else f", from an input up to {words.magnitude(most)}.")
        + what_if,
        do=f"No loss scale changes that. {do}",
        step=step,
        where=place,
    )
