# SPDX-License-Identifier: BSD-3-Clause
"""Measurements that advice rests on: what is out of the ordinary in tensors and casts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from preamp.numerics import TensorStatistics
from preamp.report import words
from preamp.report.gather import Run, gradients_of, latest


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A number over time that advice rests on."""

    name: str  # what it is
    points: Sequence[tuple[float, float]]  # step and number
    is_share: bool = True  # whether it lies between 0 and 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What a rule found, for its words and its picture."""

    values: dict[str, str] = field(default_factory=dict[str, str])  # for the words of the rule
    step: int = 0  # at which it began; 0 where that means nothing
    where: str = ""  # parameters, module or operation that it happened in
    curve: Curve | None = None  # the number by step, where the rule has no other picture
    tensor: TensorStatistics | None = None  # whose exponents show it
    is_grave: bool = False  # critical here, although the rule is not so as such


LARGE_SCALE: Final = 2.0**15  # from which a scale is large enough for any loss of usual size
LOST_SHARE: Final = 0.1  # part of a gradient's values that may be lost before it is told of
SUBNORMAL_SHARE: Final = 0.5  # part below the normal range from which zeros beside it are lost
STALLED_SHARE: Final = 0.3  # part of the weights that a step may leave as they were
HEADROOM: Final = 2.0  # powers of two below the largest value of the format

LEARNT: Final = 0.1  # part of the first loss that the last before a loss of zero comes down to

DEAD_LOOKS: Final = 3  # in a row without a gradient, of parameters that nothing reaches any more
LINE_SHARE: Final = 0.5
LINE_BYTES: Final = 2**20

Number = Callable[[TensorStatistics], float]


def weights_not_finite(run: Run) -> Iterator[Evidence]:
    """Yield the weights that are infinite or nan at the end."""
    bad = [t for t in latest(run) if t.what == "weight" and t.nonfinite]
    if bad:
        points = _totals(run, lambda t: t.nonfinite if t.what == "weight" else None)
        count = words.counted(sum(t.nonfinite for t in bad), "value")
        values = {"values": count, "name": words.shown(bad[0].name)}
        yield Evidence(
            values=values,
            step=_since(points, lambda share: share > 0),
            where=named([t.name for t in bad]),
        )


def gradients_all_zero(run: Run) -> Iterator[Evidence]:
    """Yield that nothing is left of any gradient, from some look to the last.

    One batch may be learnt to the last digit, and so may all be, until the loss itself is zero.
    """
    points = _totals(run, lambda t: t.zeros if t.what == "gradient" else None)
    if not points or points[-1][1] < 1 or (len(points) > 1 and points[-2][1] < 1):
        return
    step = _since(points, lambda share: share == 1)
    if _is_learnt(run, step):
        return
    tensors = gradients_of(r for r in run.numerics if r.step == step)
    scale, gradients = tensors[0].scale, words.counted(len(tensors), "gradient")
    yield Evidence(
        values={
            "form": f" in {run.half}" if _may_vanish(run, scale) else "",
            "gradients": gradients,
            "looks": words.counted(sum(at >= step for at, _ in points), "look"),
            "last": f"{points[-1][0]:,.0f}",
            "scale": words.scale(scale),
            "do": _revive(run, scale),
        },
        step=step,
        where=f"all {gradients}, {words.shown(tensors[0].name)} to {words.shown(tensors[-1].name)}",
        curve=Curve(name="Part of all gradient values that is zero", points=points),
    )


def _is_learnt(run: Run, step: int) -> bool:
    """Whether losses fell far, and then to zero, which they are in all looks from a step on."""
    looks = {record.step for record in run.numerics if record.step >= step}
    rows = run.losses().values()
    left = [[abs(loss) for at, loss in row if at < step and loss] for row in rows]
    return bool(left) and all(
        bool(rest) and rest[-1] <= LEARNT * rest[0] and not any(y for x, y in row if x in looks)
        for row, rest in zip(rows, left, strict=True)
    )


def _revive(run: Run, scale: float) -> str:
    check = (
        "check that the loss depends on the parameters, and that no detach, no saturated function"
        " and no factor of zero comes between."
    )
    if not _may_vanish(run, scale):
        return f"No loss scale is to blame: {check}"
    do = (
        f"raise max_loss_scale, so that the scale may grow beyond {words.scale(scale)}"
        if run.is_dynamic
        else 'pass loss_scale="dynamic", which multiplies the loss by as much as gradients bear'
    )
    return (
        "float16 rounds what is below 2⁻²⁵ to zero, so nothing is learnt:"
        f" {do}, or train in bfloat16 (O4, O5). If they stay zero then, {check}"
    )


def _may_vanish(run: Run, scale: float) -> bool:
    """Whether gradients that are not zero may become so: a dynamic scale would have grown."""
    at_ceiling = scale >= (run.limit("max_loss_scale") or math.inf)
    return run.half == "float16" and scale < LARGE_SCALE and (at_ceiling or not run.is_dynamic)


def little_headroom(run: Run) -> Iterator[Evidence]:
    """Yield the tensor closest to overflow; no gradients, which a dynamic scale brings close."""
    near = [
        t
        for t in (latest(run) if run.half else ())
        if t.headroom is not None
        and t.headroom < HEADROOM
        and not (run.is_dynamic and t.what == "gradient")
    ]
    for tensor in sorted(near, key=_headroom)[:1]:
        points = _over_time(run, tensor, _headroom)
        yield Evidence(
            values={
                "name": words.shown(tensor.name),
                "what": tensor.what,
                "max": words.magnitude(tensor.max_abs),
                "headroom": f"{_headroom(tensor):.1f}",
                "form": tensor.form,
                "more": _more(len(near) - 1),
            },
            step=_since(points, lambda value: value < HEADROOM),
            where=named([t.name for t in near]),
            tensor=tensor,
            curve=Curve(name="Headroom in powers of two", points=points, is_share=False),
        )


def gradients_lost(run: Run) -> Iterator[Evidence]:
    """Yield the gradient that loses the largest share of its values at the present scale."""
    gradients = [t for t in latest(run) if t.what == "gradient" and run.half]
    if all(t.zeros == t.elements for t in gradients):
        return  # nothing tells whether there was anything to lose
    fades = any(_is_subnormal(t) for t in gradients)
    lost: Number = _lost_beside_subnormal if fades else lost_share
    losing = [t for t in gradients if lost(t) > LOST_SHARE]
    for tensor in sorted(losing, key=lost, reverse=True)[:1]:
        room = min((_headroom(t) for t in gradients if t.headroom is not None), default=0.0)
        points = _over_time(run, tensor, lost)
        yield Evidence(
            values={
                "name": words.shown(tensor.name),
                "share": words.share(lost(tensor)),
                "form": tensor.form,
                "scale": words.scale(tensor.scale),
                "more": _more(len(losing) - 1),
                "room": _room(room, run),
            },
            step=_since(points, lambda share: share > LOST_SHARE),
            where=named([t.name for t in losing]),
            tensor=tensor,
            curve=Curve(name="Part of the gradient that is lost", points=points),
        )


def updates_stalled(run: Run) -> Iterator[Evidence]:
    """Yield the share of the weights whose update rounded to nothing, and is kept nowhere else."""
    rows = [] if has_masters(run) else stalls(run)
    if rows and total_stall(rows).share > STALLED_SHARE:
        points = _totals(run, lambda t: t.stalled)
        yield Evidence(
            values={
                "share": words.share(total_stall(rows).share),
                "name": words.shown(rows[0].name),
                "worst": words.share(rows[0].share),
            },
            step=_since(points, lambda share: share > STALLED_SHARE),
            where=named([row.name for row in rows if row.share > STALLED_SHARE]),
            curve=Curve(name="Part of the half weights that a step left as is", points=points),
        )


def gradients_always_zero(run: Run) -> Iterator[Evidence]:
    """Yield the parameters that never had a gradient other than zero, where others had."""
    alive: dict[str, bool] = {}
    for tensor in gradients_of(run.numerics):
        if tensor.elements:  # a rank may have an empty part of a sharded tensor
            was_alive = alive.get(tensor.name, False)
            alive[tensor.name] = was_alive or tensor.zeros < tensor.elements
    dead = [name for name, lives in alive.items() if not lives]
    if dead and len(run.numerics) > 1:
        looks = words.counted(len(run.numerics), "look")
        values = {"name": words.shown(dead[0]), "more": _more(len(dead) - 1), "looks": looks}
        points = [(float(r.step), 1.0) for r in run.numerics]
        curve = Curve(name="Part of the gradient that is zero", points=points)
        yield Evidence(values=values, step=run.numerics[0].step, where=named(dead), curve=curve)


def no_gradient_arrives(run: Run) -> Iterator[Evidence]:
    """Yield that the first parameters of the model get no gradient any more, and later ones do.

    One whose last values were close to the smallest number has faded, which is another matter.
    """
    looks = [r for r in run.numerics if gradients_of([r])]
    rows: dict[str, list[tuple[int, TensorStatistics]]] = {}
    for record in looks:
        for t in gradients_of([record]):
            if t.elements:
                rows.setdefault(t.name, []).append((record.step, t))
    order = [name for name in (run.start.parameters if run.start else rows) if name in rows]
    since = dict[str, int]()
    for name in order:
        row = rows[name]
        alive = next(
            (i for i in range(len(row), 0, -1) if row[i - 1][1].zeros < row[i - 1][1].elements), 0
        )
        if len(row) - alive < DEAD_LOOKS or (alive and _is_subnormal(row[alive - 1][1])):
            break
        since[name] = row[alive][0]
    if not since or len(since) == len(order):
        return
    names, step = list(since), max(since.values())
    dead = [record.step for record in looks if record.step >= step]
    points = [(float(x), t.zeros / t.elements) for x, t in rows[names[0]]]
    yield Evidence(
        values={
            "name": words.shown(names[0]),
            "looks": words.counted(len(dead), "look"),
            "more": _more(len(names) - 1),
            "next": words.shown(order[len(names)]),
        },
        step=step,
        where=named(names),
        curve=Curve(name="Part of the gradient that is zero", points=points),
    )


def casts_of_one_line(run: Run) -> Iterator[Evidence]:
    """Yield the line of source that most bytes are cast for."""
    by_line: Counter[str] = Counter()
    for cast in run.casts.casts if run.casts else ():
        by_line[cast.where] += cast.bytes
    total = sum(by_line.values())
    for where, count in by_line.most_common(1):
        if len(by_line) > 1 and total >= LINE_BYTES and count > LINE_SHARE * total:
            place, part = words.shown(where), words.share(count / total)
            values = {"where": place, "bytes": words.size(count), "share": part}
            yield Evidence(values=values, where=place)


def lost_share(tensor: TensorStatistics) -> float:
    """Part of the values that are not zero that lie below the smallest value of the format."""
    return _share(tensor.below_subnormal, tensor.elements - tensor.zeros - tensor.nonfinite)


def _lost_beside_subnormal(tensor: TensorStatistics) -> float:
    """The same where gradients fade: what float16 stored as zero is lost as well."""
    if tensor.zeros < tensor.elements and not _is_subnormal(tensor):
        return lost_share(tensor)
    return _share(tensor.zeros + tensor.below_subnormal, tensor.elements - tensor.nonfinite)


def _is_subnormal(tensor: TensorStatistics) -> bool:
    """Whether most of what is left of a gradient lies below the normal range."""
    nonzero = tensor.elements - tensor.zeros - tensor.nonfinite
    return nonzero > 0 and tensor.below_normal > SUBNORMAL_SHARE * nonzero


def has_masters(run: Run) -> bool:
    """Whether float32 masters keep what half weights round away."""
    return run.start is not None and run.start.policy.get("master_weights") == "True"


def named(names: Sequence[str]) -> str:
    """Name the first of several, and how many more there are."""
    return words.shown(names[0]) + _more(len(names) - 1, "")


def _totals(run: Run, part: Callable[[TensorStatistics], int | None]) -> list[tuple[float, float]]:
    """The share by step of a part of all elements, of the tensors that have such a part."""
    counts: dict[int, tuple[int, int]] = {}
    for record in run.numerics:
        for tensor in record.tensors:
            if (found := part(tensor)) is not None:
                parts, elements = counts.get(record.step, (0, 0))
                counts[record.step] = parts + found, elements + tensor.elements
    return [(float(step), _share(*both)) for step, both in sorted(counts.items())]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _over_time(run: Run, tensor: TensorStatistics, number: Number) -> list[tuple[float, float]]:
    """The number of a tensor in all looks."""
    return [
        (float(record.step), number(t))
        for record in run.numerics
        for t in record.tensors
        if (t.what, t.name) == (tensor.what, tensor.name)
    ]


def _since(points: Sequence[tuple[float, float]], is_bad: Callable[[float], bool]) -> int:
    """The first of the last looks that all were bad."""
    first = points[-1][0]
    for step, value in reversed(points):
        if not is_bad(value):
            break
        first = step
    return int(first)


def _headroom(tensor: TensorStatistics) -> float:
    return math.inf if tensor.headroom is None else tensor.headroom


def _more(count: int, like: str = " like it") -> str:
    return f", and {count:,} more{like}" if count > 0 else ""


def _room(headroom: float, run: Run) -> str:
    """Say what a larger scale could do."""
    powers = math.floor(headroom - 1)
    if powers >= 1:
        found = "" if run.is_dynamic else ' loss_scale="dynamic" finds and keeps such a scale.'
        return (
            f"The largest gradient has {headroom:.1f} powers of two of headroom, so the scale could"
            f" be {2 ** min(powers, 60):,} times as large.{found}"
        )
    return (
        f"The largest gradient has only {headroom:.1f} powers of two of headroom, so a larger scale"
        " would overflow; bfloat16 (O4, O5) has the range for both."
    )


def module_of(name: str) -> str:
    """Return the module that a parameter belongs to."""
    return name.rpartition(".")[0] or name


@dataclass(frozen=True, slots=True, kw_only=True)
class Stall:
    """Weights of one module whose latest update rounded to nothing."""

    name: str  # qualified name of the module
    stalled: int  # elements that a step left as they were although they have a gradient
    elements: int  # all elements that were looked at

    @property
    def share(self) -> float:
        """Part of the elements."""
        return self.stalled / self.elements if self.elements else 0.0


def stalls(run: Run) -> list[Stall]:
    """Sum up the stall meter by module, the largest share first; empty if it was not on."""
    rows: dict[str, tuple[int, int]] = {}
    for tensor in latest(run):
        if tensor.stalled is not None:
            stalled, elements = rows.get(module_of(tensor.name), (0, 0))
            rows[module_of(tensor.name)] = (stalled + tensor.stalled, elements + tensor.elements)
    found = [Stall(name=name, stalled=s, elements=n) for name, (s, n) in rows.items()]
    return sorted(found, key=lambda stall: -stall.share)


def total_stall(rows: Sequence[Stall]) -> Stall:
    """Add modules up."""
    stalled, elements = sum(row.stalled for row in rows), sum(row.elements for row in rows)
    return Stall(name="", stalled=stalled, elements=elements)
