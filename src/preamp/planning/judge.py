# SPDX-License-Identifier: BSD-3-Clause
"""From forecasts to problems: what makes a level unfit, and what only makes it tight."""

from __future__ import annotations

from collections.abc import Sequence

from preamp.numerics import NumberFormat
from preamp.planning.forecast import (
    MARGIN,
    Range,
    TensorForecast,
    forecast,
    starting_scale,
)
from preamp.planning.places import Places
from preamp.planning.report import PlanProblem
from preamp.policy import Policy

LOST_LIMIT = 0.1
"""Share of a gradient's elements that may vanish before it is a problem."""

STALL_LIMIT = 0.25
"""Share of all updates that may round to nothing before it is a problem."""


def held_ranges(ranges: Sequence[Range], places: Places, policy: Policy) -> list[Range]:
    """The recorded tensors that a level has in half; updates where no master takes them."""
    return [
        values
        for values in ranges
        if places.holds(values) and not (values.what == "update" and policy.master_weights)
    ]


def scale_for(ranges: Sequence[Range], form: NumberFormat) -> float:
    """The loss scale to start with: 1 for bfloat16, which has float32's range."""
    if form.name != "float16":
        return 1.0
    gradients = [values.max_abs for values in ranges if values.what == "gradient"]
    return starting_scale(max(gradients, default=0.0), form)


def forecasts(
    ranges: Sequence[Range], form: NumberFormat, scale: float
) -> tuple[TensorForecast, ...]:
    """Put all of them into the format; the most endangered first."""
    found = [forecast(values, form, scale) for values in ranges]
    return tuple(sorted(found, key=lambda f: (not f.overflows, -f.lost_share, f.name)))


def problems_of(
    tensors: Sequence[TensorForecast], form: NumberFormat, scale: float
) -> tuple[PlanProblem, ...]:
    """Say what is wrong, the worst first."""
    found = [_overflow(t, form) for t in tensors if t.overflows]
    found += [
        _underflow(t, form, scale)
        for t in tensors
        if t.what == "gradient" and t.lost_share > LOST_LIMIT and not _is_noise(t, tensors)
    ]
    updates = [t for t in tensors if t.what == "update"]
    stalled = sum(t.stalled or 0 for t in updates)
    moving = sum(t.nonzero for t in updates)
    if stalled > STALL_LIMIT * moving:
        found.append(
            PlanProblem(
                kind="stall",
                name="",
                text=(
                    f"{stalled / moving:.0%} of the updates are too small to change a "
                    f"{form.name} weight, which has {form.mantissa_bits + 1} significant bits; "
                    "float32 masters would keep them."
                ),
            )
        )
    return tuple(found)


def is_tight(tensors: Sequence[TensorForecast], form: NumberFormat) -> bool:
    """Whether float16 fits with little room; bfloat16 never is."""
    if form.name != "float16":
        return False
    little = any(t.headroom is not None and t.headroom < MARGIN for t in tensors)
    return little or any(
        t.what == "gradient" and t.lost_share > LOST_LIMIT / 10 and not _is_noise(t, tensors)
        for t in tensors
    )


def _is_noise(tensor: TensorForecast, tensors: Sequence[TensorForecast]) -> bool:
    """Whether a gradient is rounding error, as of a bias before a batch norm, which cancels."""
    largest = max((t.max_abs for t in tensors if t.what == "gradient"), default=0.0)
    return tensor.max_abs < largest * 2.0**-20


def _overflow(tensor: TensorForecast, form: NumberFormat) -> PlanProblem:
    is_gradient = tensor.what == "gradient"
    what = {"gradient": "The gradient of ", "update": "The update of "}.get(tensor.what, "")
    return PlanProblem(
        kind="gradient overflow" if is_gradient else "overflow",
        name=tensor.name,
        text=(
            f"{what}{tensor.name} reaches {tensor.max_abs:.3g}; {form.name} ends at "
            f"{form.largest:.5g}."
        ),
    )


def _underflow(tensor: TensorForecast, form: NumberFormat, scale: float) -> PlanProblem:
    return PlanProblem(
        kind="underflow",
        name=tensor.name,
        text=(
            f"{tensor.lost_share:.0%} of the gradient of {tensor.name} lies below "
            f"{form.name}'s smallest value {form.smallest_subnormal:.2g} at loss scale "
            f"{scale:,.0f}."
        ),
    )
