# SPDX-License-Identifier: BSD-3-Clause
"""Measurements that advice rests on: what is out of the ordinary in the tensors of a run."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from preamp.numerics import TensorStatistics
from preamp.report import words
from preamp.report.gather import Run
from preamp.report.layers import latest, stalls, total_stall

Values = dict[str, str]
"""Numbers and names for the words of a finding, already spelled."""

LOST_SHARE: Final = 0.1
"""Part of a gradient's values that may be lost before it is told of."""

STALLED_SHARE: Final = 0.3
"""Part of the weights that a step may leave as they were."""

HEADROOM: Final = 2.0
"""Powers of two below the largest value of the format."""

LINE_SHARE: Final = 0.5
LINE_BYTES: Final = 2**20


def weights_not_finite(run: Run) -> Iterator[Values]:
    """Yield the weights that are infinite or nan at the end."""
    bad = [t for t in latest(run) if t.what == "weight" and t.nonfinite]
    if bad:
        count = words.counted(sum(t.nonfinite for t in bad), "value")
        yield {"values": count, "name": words.shown(bad[0].name)}


def little_headroom(run: Run) -> Iterator[Values]:
    """Yield the tensor closest to overflow.

    A gradient under a dynamic scale is left out: the scale grows until it comes close.
    """
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
