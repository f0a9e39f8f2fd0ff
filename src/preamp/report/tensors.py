# SPDX-License-Identifier: BSD-3-Clause
"""Findings on tensors: gradients that vanish, values close to overflow."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from preamp.numerics import TensorStatistics
from preamp.report import words
from preamp.report.finding import Finding, more, named
from preamp.report.gather import Run, gradients_of, latest

LARGE_SCALE: Final = 2.0**15  # from which a scale is large enough for any loss of usual size
LOST_SHARE: Final = 0.1  # part of a gradient's values that may be lost before it is told of
SUBNORMAL_SHARE: Final = 0.5  # part below the normal range from which zeros beside it are lost
HEADROOM: Final = 2.0  # powers of two below the largest value of the format

LEARNT: Final = 0.1  # part of the first loss that the last before a loss of zero comes down to

Number = Callable[[TensorStatistics], float]


def weights_not_finite(run: Run) -> Iterator[Finding]:
    """Yield the weights that are infinite or nan at the end."""
    bad = [t for t in latest(run) if t.what == "weight" and t.nonfinite]
    if bad:
        points = totals(run, lambda t: t.nonfinite if t.what == "weight" else None)
        count = words.counted(sum(t.nonfinite for t in bad), "value")
        yield Finding(
            id="weights-not-finite",
            title="Weights are infinite or nan",
            number=f"{count} at the latest look, the first in {words.shown(bad[0].name)}.",
            do="No step can repair them. Go back to a checkpoint from before, and look at the data "
            "and the learning rate of the steps before this look.",
            step=bad_since(points, lambda share: share > 0),
            where=named([t.name for t in bad]),
        )


def gradients_all_zero(run: Run) -> Iterator[Finding]:
    """Yield that nothing is left of any gradient, from some look to the last.

    One batch may be learnt to the last digit, and so may all be, until the loss itself is zero.
    """
    points = totals(run, lambda t: t.zeros if t.what == "gradient" else None)
    if not points or points[-1][1] < 1 or (len(points) > 1 and points[-2][1] < 1):
        return
    step = bad_since(points, lambda share: share == 1)
    if _is_learnt(run, step):
        return
    tensors = gradients_of(r for r in run.numerics if r.step == step)
    scale, gradients = tensors[0].scale, words.counted(len(tensors), "gradient")
    looks = words.counted(sum(at >= step for at, _ in points), "look")
    yield Finding(
        id="gradients-all-zero",
        title=f"All gradients are zero{f' in {run.half}' if _may_vanish(run, scale) else ''}",
        number=f"{gradients} had no value other than zero in {looks}, the latest at step"
        f" {points[-1][0]:,.0f}, at a loss scale of {words.scale(scale)}.",
        do=_revive(run, scale),
        step=step,
        where=f"all {gradients}, {words.shown(tensors[0].name)} to {words.shown(tensors[-1].name)}",
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


def little_headroom(run: Run) -> Iterator[Finding]:
    """Yield the tensor closest to overflow; no gradients, which a dynamic scale brings close."""
    near = [
        t
        for t in (latest(run) if run.half else ())
        if t.what == "weight" or (t.what == "gradient" and not run.is_dynamic)
        if t.headroom is not None and t.headroom < HEADROOM
    ]
    for tensor in sorted(near, key=_headroom)[:1]:
        points = _over_time(run, tensor, _headroom)
        yield Finding(
            id="little-headroom",
            title=f"Values come close to the largest {tensor.form} number",
            number=f"The {tensor.what} {words.shown(tensor.name)} reaches"
            f" {words.magnitude(tensor.max_abs)}, {_headroom(tensor):.1f} powers of two below it"
            f"{more(len(near) - 1)}.",
            do="A little growth overflows. Scale or normalise the values, keep the module in"
            " float32, or use bfloat16 (O4, O5).",
            step=bad_since(points, lambda value: value < HEADROOM),
            where=named([t.name for t in near]),
        )


def gradients_lost(run: Run) -> Iterator[Finding]:
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
        yield Finding(
            id="gradients-lost",
            title=f"Gradients vanish below the smallest {tensor.form} number",
            number=f"{words.share(lost(tensor))} of the values in {words.shown(tensor.name)} are"
            f" lost at a loss scale of {words.scale(tensor.scale)}{more(len(losing) - 1)}.",
            do=_room(room, run),
            step=bad_since(points, lambda share: share > LOST_SHARE),
            where=named([t.name for t in losing]),
        )


def lost_share(tensor: TensorStatistics) -> float:
    """Part of the values that are not zero that lie below the smallest value of the format."""
    return _share(tensor.below_subnormal, tensor.nonzero)


def _lost_beside_subnormal(tensor: TensorStatistics) -> float:
    """The same where gradients fade: what float16 stored as zero is lost as well."""
    if tensor.zeros < tensor.elements and not _is_subnormal(tensor):
        return lost_share(tensor)
    return _share(tensor.zeros + tensor.below_subnormal, tensor.elements - tensor.nonfinite)


def _is_subnormal(tensor: TensorStatistics) -> bool:
    """Whether most of what is left of a gradient lies below the normal range."""
    return tensor.underflow > SUBNORMAL_SHARE


def totals(run: Run, part: Callable[[TensorStatistics], int | None]) -> list[tuple[float, float]]:
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


def bad_since(points: Sequence[tuple[float, float]], is_bad: Callable[[float], bool]) -> int:
    """The first of the last looks that all were bad."""
    first = points[-1][0]
    for step, value in reversed(points):
        if not is_bad(value):
            break
        first = step
    return int(first)


def _headroom(tensor: TensorStatistics) -> float:
    return math.inf if tensor.headroom is None else tensor.headroom


def _room(headroom: float, run: Run) -> str:
    """Say what a larger scale could do."""
    powers = math.floor(headroom - 1)
    if powers >= 1:
        found = ' loss_scale="dynamic" finds and keeps such a scale.'
        if run.is_dynamic:
            ceiling, now = run.limit("max_loss_scale"), run.first_scales[-1:]
            at_ceiling = bool(now) and now[0][1] == ceiling
            found = " It is at its ceiling: raise max_loss_scale." if at_ceiling else ""
        return (
            f"The largest gradient has {headroom:.1f} powers of two of headroom, so the scale could"
            f" be {2 ** min(powers, 60):,} times as large.{found}"
        )
    return (
        f"The largest gradient has only {headroom:.1f} powers of two of headroom, so a larger scale"
        " would overflow; bfloat16 (O4, O5) has the range for both."
    )
