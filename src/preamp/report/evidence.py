# SPDX-License-Identifier: BSD-3-Clause
"""Measurements that advice rests on: what is out of the ordinary in a run and its tensors."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from statistics import median_low
from typing import Final

from preamp.numerics import StepRecord, TensorStatistics
from preamp.report import words
from preamp.report.gather import Run
from preamp.report.layers import latest, stalls, total_stall

Values = dict[str, str]  # numbers and names for the words of a finding, already spelled

LOST_SHARE: Final = 0.1  # part of a gradient's values that may be lost before it is told of
STALLED_SHARE: Final = 0.3  # part of the weights that a step may leave as they were
HEADROOM: Final = 2.0  # powers of two below the largest value of the format

LINE_SHARE: Final = 0.5
LINE_BYTES: Final = 2**20


def weights_not_finite(run: Run) -> Iterator[Values]:
    """Yield the weights that are infinite or nan at the end."""
    bad = [t for t in latest(run) if t.what == "weight" and t.nonfinite]
    if bad:
        count = words.counted(sum(t.nonfinite for t in bad), "value")
        yield {"values": count, "name": words.shown(bad[0].name)}


def little_headroom(run: Run) -> Iterator[Values]:
    """Yield the tensor closest to overflow; no gradients, which a dynamic scale brings close."""
    near = [
        t
        for t in (latest(run) if uses_half(run) else ())
        if t.headroom is not None
        and t.headroom < HEADROOM
        and not (run.is_dynamic and t.what == "gradient")
    ]
    for tensor in sorted(near, key=_headroom)[:1]:
        yield {
            "name": words.shown(tensor.name),
            "what": tensor.what,
            "max": words.magnitude(tensor.max_abs),
            "headroom": f"{_headroom(tensor):.1f}",
            "form": tensor.form,
            "more": _more(len(near) - 1),
        }


def gradients_lost(run: Run) -> Iterator[Values]:
    """Yield the gradient that loses the largest share of its values at the present scale."""
    gradients = [t for t in latest(run) if t.what == "gradient" and uses_half(run)]
    losing = [t for t in gradients if lost_share(t) > LOST_SHARE]
    for tensor in sorted(losing, key=lost_share, reverse=True)[:1]:
        room = min((_headroom(t) for t in gradients if t.headroom is not None), default=0.0)
        yield {
            "name": words.shown(tensor.name),
            "share": words.share(lost_share(tensor)),
            "form": tensor.form,
            "scale": words.scale(tensor.scale),
            "more": _more(len(losing) - 1),
            "room": _room(room),
        }


def updates_stalled(run: Run) -> Iterator[Values]:
    """Yield the share of the weights whose update rounded to nothing, and is kept nowhere else."""
    rows = [] if has_masters(run) else stalls(run)
    if rows and total_stall(rows).share > STALLED_SHARE:
        yield {
            "share": words.share(total_stall(rows).share),
            "name": words.shown(rows[0].name),
            "worst": words.share(rows[0].share),
        }


def gradients_always_zero(run: Run) -> Iterator[Values]:
    """Yield the parameters that never had a gradient other than zero."""
    alive: dict[str, bool] = {}
    for record in run.numerics:
        for tensor in record.tensors:
            # A rank may have an empty part of a sharded tensor.
            if tensor.what == "gradient" and tensor.elements:
                was_alive = alive.get(tensor.name, False)
                alive[tensor.name] = was_alive or tensor.zeros < tensor.elements
    dead = [name for name, lives in alive.items() if not lives]
    if dead and len(run.numerics) > 1:
        looks = words.counted(len(run.numerics), "look")
        yield {"name": words.shown(dead[0]), "more": _more(len(dead) - 1), "looks": looks}


def casts_of_one_line(run: Run) -> Iterator[Values]:
    """Yield the line of source that most bytes are cast for."""
    by_line: Counter[str] = Counter()
    for cast in run.casts.casts if run.casts else ():
        by_line[cast.where] += cast.bytes
    total = sum(by_line.values())
    for where, count in by_line.most_common(1):
        if len(by_line) > 1 and total >= LINE_BYTES and count > LINE_SHARE * total:
            part = words.share(count / total)
            yield {"where": words.shown(where), "bytes": words.size(count), "share": part}


def lost_share(tensor: TensorStatistics) -> float:
    """Part of the values that are not zero that lie below the smallest value of the format."""
    nonzero = tensor.elements - tensor.zeros - tensor.nonfinite
    return tensor.below_subnormal / nonzero if nonzero else 0.0


def uses_half(run: Run) -> bool:
    """Whether anything is in a half format, as far as the records tell."""
    return run.start is None or run.start.opt_level != "O0"


def has_masters(run: Run) -> bool:
    """Whether float32 masters keep what half weights round away."""
    return run.start is not None and run.start.policy.get("master_weights") == "True"


def _headroom(tensor: TensorStatistics) -> float:
    return math.inf if tensor.headroom is None else tensor.headroom


def _more(count: int) -> str:
    return f", and {count:,} more like it" if count > 0 else ""


def _room(headroom: float) -> str:
    """Say what a larger scale could do."""
    powers = math.floor(headroom - 1)
    if powers >= 1:
        return (
            f"The largest gradient has {headroom:.1f} powers of two of headroom, so the scale could"
            f" be {2 ** min(powers, 60):,} times as large."
        )
    return (
        f"The largest gradient has only {headroom:.1f} powers of two of headroom, so a larger scale"
        " would overflow; bfloat16 (O4, O5) has the range for both."
    )


RISE: Final = 3.0  # how far a loss may end above where it began, in units of what it began with
RISE_WINDOW: Final = 5  # losses at either end whose median is taken, where there are enough
SAME_PARAMETER: Final = 3  # skipped steps that begin in one parameter before it is told of
SKIPS_IN_ROW: Final = 12  # the default scale of 2**16 comes down to 16 in as many
SKIPPED_SHARE: Final = 0.02  # part of the steps that may be skipped once a scale is found

SKIPPED_SPARE: Final = 2
"""As many may be skipped in any run, however short, unless they are half of its steps."""

CEILING_SHARE: Final = 0.25
FLOOR: Final = 1.0


def losses_not_finite(run: Run) -> Iterator[Values]:
    """Yield the number of steps whose loss was infinite or nan."""
    bad = [s.step for s in run.steps if not all(map(math.isfinite, s.losses.values()))]
    early = [o.step for o in run.overflows if not o.loss_was_finite]
    steps = sorted({*bad, *early})
    if steps:
        yield {"steps": words.counted(len(steps), "step"), "first": f"{steps[0]:,}"}


def overflows_in_one_place(run: Run) -> Iterator[Values]:
    """Yield the parameter that most skipped steps begin in, if it is most of them.

    Skips before the first step that was taken are left out: the scale is still being found.
    """
    found = min((step.step for step in run.steps if not step.skipped), default=0)
    causes = [o for o in run.overflows if o.parameters and o.loss_was_finite and o.step > found]
    first = Counter(overflow.parameters[0] for overflow in causes)
    for name, count in first.most_common(1):
        if count >= SAME_PARAMETER and 2 * count > sum(first.values()):
            total = words.counted(sum(first.values()), "skipped step")
            yield {"count": f"{count:,}", "total": total, "name": words.shown(name)}


def no_step_taken(run: Run) -> Iterator[Values]:
    """Yield the optimizers that skipped all of their steps."""
    for steps, whose in _by_optimizer(run):
        if _searching(steps) == len(steps):
            yield {"steps": words.counted(len(steps), "step"), "whose": whose}


def many_skips(run: Run) -> Iterator[Values]:
    """Yield the share of skipped steps, beyond what finding a scale and keeping it takes.

    Skips before the first step that was taken are left out: the scale is still being found.
    """
    for steps, whose in _by_optimizer(run):
        rest = steps[_searching(steps) :]
        skipped = sum(step.skipped for step in rest)
        is_half = skipped >= SKIPPED_SPARE and 2 * skipped >= len(rest)
        if is_half or skipped > max(SKIPPED_SPARE, SKIPPED_SHARE * len(rest)):
            yield {
                "skipped": f"{skipped:,}",
                "steps": words.counted(len(rest), "step"),
                "whose": whose,
                "share": words.share(skipped / len(rest)),
                "since": " from the first that was taken" if len(rest) < len(steps) else "",
                "schedule": _schedule(steps),
            }


def skips_in_a_row(run: Run) -> Iterator[Values]:
    """Yield the longest row of skipped steps of an optimizer that has taken others."""
    for steps, whose in _by_optimizer(run):
        rows = [list(row) for skipped, row in groupby(steps, lambda s: s.skipped) if skipped]
        longest = max(rows, key=len, default=list[StepRecord]())
        if SKIPS_IN_ROW <= len(longest) < len(steps):
            yield {
                "row": words.counted(len(longest), "step"),
                "end": f"{longest[-1].step:,}",
                "whose": whose,
                "schedule": _schedule(steps),
            }


def long_search(run: Run) -> Iterator[Values]:
    """Yield the skips that a short run began with, where they are most of it."""
    for steps, whose in _by_optimizer(run):
        count = _searching(steps)
        if 1 < count < min(len(steps), SKIPS_IN_ROW) and 2 * count >= len(steps):
            yield {
                "skipped": f"{count:,}",
                "steps": words.counted(len(steps), "step"),
                "whose": whose,
            }


def losses_risen(run: Run) -> Iterator[Values]:
    """Yield the losses that end far above where they began."""
    for loss_id, points in run.losses().items():
        finite = [loss for _, loss in points if math.isfinite(loss)]
        width = max(1, min(RISE_WINDOW, len(finite) // 4))
        first, last = finite[:width], finite[-width:]
        unit = max(map(abs, first), default=0.0)
        if unit and median_low(last) - median_low(first) > RISE * unit:
            begun, ended = map(words.magnitude, (median_low(first), median_low(last)))
            yield {"loss": str(loss_id), "first": begun, "last": ended}


def scale_at_floor(run: Run) -> Iterator[Values]:
    """Yield a dynamic scale that has come down to nothing, or to its floor."""
    floor = max(FLOOR, _limit(run, "min_loss_scale") or 0.0)
    for loss_id, points in run.scales().items() if run.is_dynamic else ():
        low = min(value for _, value in points)
        if low <= floor and points[-1][1] <= 4 * floor and points[0][1] > floor:
            yield {"loss": str(loss_id), "scale": words.scale(points[-1][1])}


def scale_at_ceiling(run: Run) -> Iterator[Values]:
    """Yield a dynamic scale that spends much of the run at its ceiling."""
    ceiling = _limit(run, "max_loss_scale")
    for loss_id, points in run.scales().items() if run.is_dynamic and ceiling else ():
        at = sum(value == ceiling for _, value in points)
        if at > CEILING_SHARE * len(points):
            part = words.share(at / len(points))
            yield {"loss": str(loss_id), "scale": words.scale(points[-1][1]), "share": part}


def _limit(run: Run, name: str) -> float | None:
    try:
        return float(run.start.policy[name]) if run.start else None
    except (KeyError, ValueError):
        return None


def _by_optimizer(run: Run) -> Iterator[tuple[list[StepRecord], str]]:
    """Yield the steps of each optimizer, and how to tell it from others."""
    found: dict[int, list[StepRecord]] = {}
    for step in run.steps:
        found.setdefault(step.optimizer, []).append(step)
    for optimizer, steps in sorted(found.items()):
        yield steps, f" of optimizer {optimizer}" if len(found) > 1 else ""


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
