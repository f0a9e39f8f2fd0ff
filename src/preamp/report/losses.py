# SPDX-License-Identifier: BSD-3-Clause
"""Findings on losses that went up, and what changed before they did."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median_low
from typing import Final

from preamp.numerics import NumericsRecord
from preamp.report import words
from preamp.report.chart import running_median
from preamp.report.finding import Finding
from preamp.report.gather import Run, gradients_of

RISE: Final = 3.0  # how far a loss may end above where it began, in units of what it began with
RISE_WINDOW: Final = 5  # losses at either end whose median is taken, where there are enough
JUMP: Final = 10.0  # times the largest loss of some steps before
JUMP_WINDOW: Final = 20  # as many steps
BACK_WINDOW: Final = 5  # as many later a jump of a single batch is over
BACK: Final = 2.0  # times the largest loss before, below which a jump is over
CALM: Final = 2.0  # times their median that losses reach where nothing leads up to a jump
JUMP_FLOOR: Final = 0.1  # part of the first losses that a jump has to reach
RESUMED_STEPS: Final = 5  # after a checkpoint, in which a jump may come of it
RAISED: Final = 10.0  # times the learning rate before, from which what follows is laid to it
RAISED_STEPS: Final = 5  # steps later in which it may break the run before any loss shows it
REWRITTEN: Final = 4.0  # times the size of a weight, between looks, that is laid to the script
GREW: Final = 10.0  # times that a gradient of a weight grows beside its bias, where data did

Point = tuple[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Raise:
    """A learning rate that was raised to what it had never been."""

    old: float
    new: float
    step: int  # the first with the new rate; the loss of the next one shows it
    lowest: Point | None = None  # of a warm-up: where the loss was lowest, and the rate there

    @property
    def told(self) -> str:
        """What happened, as a sentence."""
        if self.lowest:
            grew = f"grew from {words.magnitude(self.old)} to {words.magnitude(self.new)}"
            return f" The learning rate {grew} at step {self.step:,}."
        old, new = words.magnitude(self.old), words.magnitude(self.new)
        return f" Step {self.step:,} raised the learning rate from {old} to {new}."

    @property
    def do(self) -> str:
        """What to do about it, as a sentence."""
        if self.lowest:
            step, rate = self.lowest
            return (
                f"Lower the learning rate first: it may end its warm-up at {words.magnitude(rate)},"
                f" as in step {step:,}, where the loss was lowest."
            )
        return f"Lower the learning rate first: back towards {words.magnitude(self.old)}."


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Where a loss turned for the worse."""

    loss: str  # its name
    step: int  # the first step that shows it
    before: float  # what it did not exceed before, for some steps
    points: Sequence[Point]  # the finite losses, with their steps
    cause: Raise | None  # ``None`` where it was no learning rate
    peak: Point  # the first loss that is far above it, or the last one
    is_lasting: bool  # whether it was not over where the run broke, or ended
    after: Point | None = None  # where it was over


def first_turn(run: Run, end: float) -> Turn | None:
    """The first change that lasted until a run broke at step ``end``; ``None`` if none is known."""
    found = (turn for name, row in run.losses().items() for turn in _turns(run, name, row, end))
    return min((t for t in found if t.is_lasting), key=lambda turn: turn.step, default=None)


def _turns(run: Run, name: str, row: Sequence[Point], end: float = math.inf) -> Iterator[Turn]:
    """Where one loss turned for the worse before step ``end``, at which the run broke."""
    points = [point for point in finite_of(row) if point[0] < end]
    raises = [r for r in _raises(run) if r.step < end]
    told = list[int]()
    for raised in raises:
        start, later = [y for x, y in points if x <= raised.step], _from(points, raised.step + 1)
        unit = _unit(points)
        usual = median_low(start[-RISE_WINDOW:]) if start else 0.0
        high = [p for p in later[:JUMP_WINDOW] if p[1] > usual + RISE * unit]
        is_near = math.isfinite(end) and raised.step >= end - RAISED_STEPS
        if not start or not unit or not (high or is_near):
            continue
        told.append(raised.step)
        stays = bool(later) and median_low([y for _, y in later[-RISE_WINDOW:]]) > usual + unit
        lasts = stays if math.isfinite(end) else rise_of(points) is not None
        peak = [*high, points[-1]][0]
        back = next((p for p in later if p[1] <= usual and p[0] > peak[0]), None)
        yield Turn(
            loss=name,
            step=raised.step + 1,
            before=max(map(abs, start[-JUMP_WINDOW:])),
            points=points,
            cause=raised,
            peak=peak,
            is_lasting=is_near or (bool(high) and lasts),
            after=None if lasts else back,
        )
    for at, before, after in _jumps(points):
        step = points[at][0]
        if any(start < step <= start + JUMP_WINDOW for start in told):
            continue
        lasts = after is None and (math.isfinite(end) or rise_of(points) is not None)
        calm = at >= JUMP_WINDOW and before <= CALM * median_low(
            [abs(y) for _, y in points[at - JUMP_WINDOW : at]]
        )
        yield Turn(
            loss=name,
            step=step,
            before=before,
            points=points,
            cause=_warm_up(run, points, step),
            peak=points[at],
            is_lasting=lasts and calm,
            after=after,
        )


def _raises(run: Run) -> Iterator[Raise]:
    """Learning rates that were raised tenfold, by one step, to what they had never been.

    A restart to what one was before does not count: that rate has done no harm.
    """
    for steps, _ in run.by_optimizer():
        rates = [(s.step, s.lr) for s in steps if s.lr is not None]
        usual = rates[0][1] if rates else 0.0
        for (_, old), (step, new) in pairwise(rates):
            if old > 0 and new >= RAISED * old and new > usual:
                yield Raise(old=old, new=new, step=step)
            usual = max(usual, new)


def _warm_up(run: Run, points: Sequence[Point], step: int) -> Raise | None:
    """The warm-up that has come to its highest rate not long before a step, if there is one."""
    for steps, _ in run.by_optimizer():
        rates = [(s.step, s.lr) for s in steps if s.lr is not None and s.step < step]
        if not rates:
            continue
        when, high = max(rates, key=lambda pair: (pair[1], -pair[0]))
        before = [(x, y) for x, y in points if x < step]
        if before and rates[0][1] * RAISED <= high and when >= step - JUMP_WINDOW:
            medians = running_median([y for _, y in before], RISE_WINDOW // 2)
            best = before[medians.index(min(medians))][0]
            lowest = best, next((rate for x, rate in rates if x >= best), high)
            return Raise(old=rates[0][1], new=high, step=when, lowest=lowest)
    return None


def _from(points: Sequence[Point], step: int) -> list[Point]:
    return [point for point in points if point[0] >= step]


def finite_of(points: Sequence[Point]) -> list[Point]:
    """The losses that are finite, with their steps."""
    return [(step, loss) for step, loss in points if math.isfinite(loss)]


def _unit(points: Sequence[Point]) -> float:
    """The size of the first losses, which others are measured by."""
    width = max(1, min(RISE_WINDOW, len(points) // 4))
    return max((abs(y) for _, y in points[:width]), default=0.0)


def rise_of(points: Sequence[Point]) -> tuple[float, float, int] | None:
    """What finite losses began with, what they end with, and since when they lie far above that.

    ``None`` unless the last few, or half of the last quarter, lie more than `RISE` times what they
    began with above it.
    """
    width = max(1, min(RISE_WINDOW, len(points) // 4))
    first, last = [y for _, y in points[:width]], [y for _, y in points[-width:]]
    if not (unit := _unit(points)):
        return None
    limit = median_low(first) + RISE * unit
    if median_low(last) > limit:
        began = points[-1][0]
        for step, loss in reversed(points):
            if loss <= limit and step < points[-width][0]:
                break
            began = step
        return median_low(first), median_low(last), began
    quarter = [y for _, y in points[-max(1, len(points) // 4) :]]
    if median_low(quarter) > limit:  # it goes up and down, and ends with a good batch
        return median_low(first), median_low(quarter), next(x for x, y in points if y > limit)
    return None


def _jumps(points: Sequence[Point]) -> Iterator[tuple[int, float, Point | None]]:
    """Yield where losses jump, what they did not exceed before, and where they are back.

    Where the largest of some losses is many times their median, as of small batches when nearly
    everything is learnt, a jump has to be larger: the logarithm of the loss has to lie three times
    as far above that of the median as the largest does. Few losses say little.
    """
    floor = JUMP_FLOOR * median_low([abs(y) for _, y in points[:RISE_WINDOW]]) if points else 0.0
    at = 2
    while at < len(points):
        window = [abs(y) for _, y in points[max(0, at - JUMP_WINDOW) : at]]
        before, usual = max(window), median_low([y for y in window if y] or [1.0])
        spread = before / usual  # times itself, not squared: a power raises where it is too large
        limit = before * max(JUMP if at >= RISE_WINDOW else JUMP**2, spread * spread)
        if not (before and points[at][1] > max(limit, floor)):
            at += 1
            continue
        over = max(BACK * before, floor / BACK)
        back = next((i for i in range(at, len(points)) if points[i][1] <= over), None)
        yield at, before, None if back is None else points[back]
        if back is None:
            return
        at = max(back, at + JUMP_WINDOW // 2)


def rate_before(run: Run, step: int) -> str:
    """Say what the learning rate was on the way to a step; nothing where it is not known."""
    told = ""
    for steps, whose in run.by_optimizer():
        rates = [(s.step, s.lr) for s in steps if s.lr is not None and s.step <= step]
        changes = [b for a, b in pairwise(rates) if a[1] != b[1]]
        since = f" since step {changes[-1][0]:,}" if changes else ""
        if rates:
            told += f" The learning rate{whose} is {words.magnitude(rates[-1][1])}{since}."
    return told


def went_on(run: Run, step: int) -> str:
    """Say that a run went on from a checkpoint shortly before a step; nothing if it did not."""
    resumed = [at for at in run.resumed if 0 < at < step <= at + RESUMED_STEPS]
    return f" The run went on from a checkpoint at step {resumed[-1]:,}." if resumed else ""


# -- what the rules say of it ----------------------------------------------------------------


def losses_jump(run: Run, broken: Turn | None, end: str) -> Iterator[Finding]:
    """Yield the jump that the run broke after, or else the largest of each loss.

    Jumps that a rate explains, and that last, are told of as a training that diverges.
    """
    if broken is not None:
        if broken.cause is None:
            yield _jumped(run, broken, 0, end)
        return
    for name, row in run.losses().items():
        found = list(_turns(run, name, row))
        lasting = [turn for turn in found if turn.is_lasting]
        if found and (lasting or not rise_of(found[0].points)):
            turn = max(lasting or found, key=lambda t: abs(t.peak[1] / (t.before or 1.0)))
            if not (turn.is_lasting and turn.cause):
                yield _jumped(run, turn, len(found) - 1, "")


def _jumped(run: Run, turn: Turn, more: int, end: str) -> Finding:
    (step, loss), after = turn.peak, turn.after
    back = f"; back at {words.magnitude(after[1])} at step {after[0]:,}" if after else ""
    resumed, data = went_on(run, step), _data_grew(run, step)
    rate = turn.cause.told if turn.cause else rate_before(run, step)
    often = f", and jumps {words.counted(more, 'more time')}" if more else ""
    return Finding(
        id="loss-jumps",
        title=f"The loss jumps to {words.magnitude(loss)}",
        number=f"That is {words.magnitude(loss / (turn.before or 1.0))} times the largest of the"
        f" steps before{back}{often}{end}.{data}{rate}{resumed}",
        do=_cure(run, turn.cause) or _after_jump(turn, data, is_resumed=bool(resumed)),
        step=step,
        where=f"loss {turn.loss}",
        is_grave=bool(end),
    )


def _cure(run: Run, cause: Raise | None) -> str:
    """Say what to do about a rate; nothing without one."""
    if cause is None:
        return ""
    of_schedule = " Save the state of its schedule in the checkpoint, and load it."
    return cause.do + (of_schedule if went_on(run, cause.step) else "")


def _after_jump(turn: Turn, data: str, *, is_resumed: bool) -> str:
    """Say what to do about a jump: of one batch, of all later ones, or of a run that went on."""
    step = turn.step
    if is_resumed:
        return (
            "Look at what the checkpoint did not bring back: weights, buffers, the state of the"
            " optimizer, the learning rate, the place in the data."
        )
    if any(point == turn.after for point in _from(turn.points, step)[: BACK_WINDOW + 1]):
        return (
            f"Look at the batch of step {step:,}: outliers, wrong labels, a sum in place of a mean."
            " If it is right, clip gradients or lower the learning rate."
        )
    first = "the scale of the data" if data else "the data, the labels"
    return (
        f"Unless the task changes there on purpose, look at what is different from step {step:,}"
        f" on: {first}, what the loss is divided by, and weights that the script wrote to. If"
        " nothing is, lower the learning rate."
    )


def _around(run: Run, step: int) -> tuple[NumericsRecord, NumericsRecord] | None:
    """The looks before a step, and at it or after."""
    before = [r for r in run.numerics if r.step < step]
    later = [r for r in run.numerics if r.step >= step and gradients_of([r])]
    return (before[-1], later[0]) if before and later else None


def _data_grew(run: Run, step: int) -> str:
    """Say that what goes into the model grew at a step; nothing where that is not known.

    The gradient of a weight is a sum of products with what goes into its layer, that of the bias
    the same sum without, so only the scale of the input changes their ratio by much.
    """
    looks = _around(run, step)
    names = [n.rpartition(".")[0] for n in (run.start.parameters if run.start else ())]
    if looks is None or not names:
        return ""
    weight, bias = f"{names[0]}.weight", f"{names[0]}.bias"
    ratios = list[float]()
    for look in looks:
        sizes = {t.name: t.rms for t in gradients_of([look])}
        if not sizes.get(weight) or not sizes.get(bias):
            return ""
        ratios.append(sizes[weight] / sizes[bias])
    times = ratios[1] / ratios[0]
    if times < GREW:
        return ""
    shown = words.shown(names[0])
    return (
        f" Beside that of its bias, the gradient of the weight of {shown} is"
        f" {words.magnitude(times)} times what it was: so much larger is what goes into it."
    )


def rewritten(run: Run) -> Finding | None:
    """The first weights that changed in size by more than updates can, between two looks."""
    sizes: dict[str, tuple[int, float]] = {}
    adapts = any("eps" in options for options in (run.start.optimizers if run.start else []))
    rates = {s.step: s.lr or 0.0 for s in run.steps}
    highest = max(rates.values(), default=0.0)
    # What moves weights far; a warm-up begins with raises to rates that are low still.
    raised = min((r.step for r in _raises(run) if 2 * r.new > highest), default=math.inf)
    for record in run.numerics:
        weights = {t.name: t.rms for t in record.tensors if t.what == "weight"}
        pushed = {t.name: t.max_abs / t.scale for t in gradients_of([record])}
        found = list[tuple[float, str, float, float]]()
        last = 0
        for name, size in weights.items():
            last, old = sizes.get(name, (record.step, size))
            largest = 1.0 if adapts else pushed.get(name, math.inf)
            moved = RAISED * sum(
                rate for step, rate in rates.items() if last <= step <= record.step
            )
            grew = max(size, old) / (min(size, old) or math.inf)
            if grew > REWRITTEN and abs(size - old) > moved * largest:
                found.append((grew, name, old, size))
        if found and record.step < raised:
            grew, name, old, size = max(found)
            points = [p for row in run.losses().values() for p in row if last < p[0] <= record.step]
            return Finding(
                id="weights-rewritten",
                title="Weights change by more than updates can",
                number=f"{words.counted(len(found), 'weight')} of {len(weights):,} did between the"
                f" looks at steps {last:,} and {record.step:,}; the size of {words.shown(name)}"
                f" went from {words.magnitude(old)} to {words.magnitude(size)}.",
                do="Look at what writes to weights there: a layer that is made anew, a file that is"
                " loaded, an average that is copied back.",
                step=_shown_at(run, points, last) or record.step,
                where=words.shown(name),
            )
        sizes |= {name: (record.step, size) for name, size in weights.items()}
    return None


def _shown_at(run: Run, points: Sequence[Point], last: int) -> int:
    """The step between two looks whose loss is not finite, or far above the last; 0 if none is."""
    known = [y for x, y in run.first_losses if x <= last and math.isfinite(y)]
    limit = CALM * abs(known[-1]) if known else math.inf
    return next((x for x, y in points if not y <= limit), 0)


def diverges(
    run: Run, broken: Turn | None, fallen: tuple[str, Sequence[Point], int] | None, end: str
) -> Iterator[Finding]:
    """Yield losses that a rate drove far above where they began, to the end or until a break.

    ``broken`` is what the run broke after, ``fallen`` the name, finite losses and first step of a
    loss that rose to the break by and by; ``end`` says how it ended.
    """
    if broken is not None:
        if broken.cause is not None:
            yield _rising(run, broken.loss, broken.points, broken.step, end, broken.cause)
    elif fallen is not None:
        yield _rising(run, *fallen, end, _warm_up(run, fallen[1], fallen[2]))
    else:
        for name, finite, step, turn in _rises(run):
            cause = turn.cause if turn else _warm_up(run, finite, step)
            growth = _growth(run, step)
            is_worse = growth is None or growth[0] > RISE
            if cause or (is_worse and turn is None):
                yield _rising(run, name, finite, turn.step if turn else step, "", cause)


def losses_rise(run: Run) -> Iterator[Finding]:
    """Yield losses that rise far, though gradients do not: the task grew harder."""
    for name, finite, step, turn in _rises(run):
        growth, rise = _growth(run, step), rise_of(finite)
        is_told = turn is not None or _warm_up(run, finite, step) is not None
        if growth is not None and growth[0] <= RISE and rise is not None and not is_told:
            first, last = map(words.magnitude, rise[:2])
            yield Finding(
                id="loss-rises",
                title="A loss rises",
                number=f"Loss {name} went from {first} to {last}; the gradient that grew most is"
                f" {words.magnitude(growth[0])} times what it was.",
                do="Where that is meant, as against a critic that learns or with harder data, all"
                " is well. Otherwise lower the learning rate.",
                step=step,
                where=f"loss {name}",
            )


def _rises(run: Run) -> Iterator[tuple[str, Sequence[Point], int, Turn | None]]:
    """Yield losses that end far above where they began: name, finite losses, first step, change."""
    for name, points in run.losses().items():
        finite = finite_of(points)
        rise = rise_of(finite)
        if rise is not None:
            lasting = (turn for turn in _turns(run, name, points) if turn.is_lasting)
            yield name, finite, rise[2], next(lasting, None)


def _rising(
    run: Run, loss: str, points: Sequence[Point], step: int, end: str, cause: Raise | None
) -> Finding:
    start, last, _ = rise_of(points) or (points[0][1], points[-1][1], step)
    resumed = went_on(run, cause.step if cause else step)
    rate = cause.told if cause else rate_before(run, step)
    do = _cure(run, cause) or "Lower the learning rate first, by a factor of 10."
    if not end and not cause:
        do = f"Unless the loss is meant to rise, {do[:1].lower()}{do[1:]}"
    return Finding(
        id="diverges",
        title="Training diverges",
        number=f"Loss {loss} went from {words.magnitude(start)} to {words.magnitude(last)}{end}."
        f"{rate}{resumed}",
        do=f"{do} Then warm it up, or clip gradients.",
        step=step,
        where=_grown(run, step) or f"loss {loss}",
        is_grave=bool(end),
    )


def _grown(run: Run, step: int) -> str:
    times, name = _growth(run, step) or (0.0, "")
    if times <= 1:
        return ""
    grew = f"grew most, {words.magnitude(times)} times"
    return f"all of the model; the gradient of {words.shown(name)} {grew}"


def _growth(run: Run, step: int) -> tuple[float, str] | None:
    """How much the gradient that grew most did between the looks before and after a step.

    ``None`` where none was looked at on either side.
    """
    first: dict[str, float] = {}
    grown: list[tuple[float, str]] = []
    for record in run.numerics:
        for t in gradients_of([record]):
            size = t.rms / t.scale
            if record.step <= step:
                first[t.name] = size
            elif first.get(t.name):
                grown.append((size / first[t.name], t.name))
    return max(grown, default=None)
