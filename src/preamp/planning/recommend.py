# SPDX-License-Identifier: BSD-3-Clause
"""From forecasts to problems that make a level unfit or tight, and which of the levels to take."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from preamp.numerics import NumberFormat
from preamp.planning.forecast import MARGIN, Range, TensorForecast, forecast, starting_scale
from preamp.planning.ranges import Places
from preamp.planning.report import LevelPlan, PlanProblem, bytes_text, problem_lines
from preamp.policy import OPT_LEVELS, Policy

LOST_LIMIT = 0.1  # share of a gradient's elements that may vanish before it is a problem
STALL_LIMIT = 0.25  # share of all updates that may round to nothing before it is a problem


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


CLOSE = 1.1  # levels whose bytes moved differ by less than this factor count as equally fast


def candidates(levels: Mapping[str, LevelPlan]) -> list[str]:
    """The opt levels that fit, best first.

    Those that update float32 weights come before those that do not, roomy ones before tight ones,
    and then those that move clearly fewer bytes. Among equals float16 wins, which has 11
    significant bits where bfloat16 has 8.
    """
    fitting = [p for name, p in levels.items() if p.fits and name in OPT_LEVELS]
    least = min((plan.moved for plan in fitting), default=0)

    def rank(plan: LevelPlan) -> tuple[bool, bool, int, bool, float]:
        policy = OPT_LEVELS[plan.level]
        keeps_digits = policy.master_weights or policy.cast_model_type is None
        cost = math.floor(math.log(max(plan.moved, 1) / max(least, 1), CLOSE))
        return not keeps_digits, plan.is_tight, cost, plan.half != "float16", plan.moved

    return [plan.level for plan in sorted(fitting, key=rank)]


def reasons_for(
    recommended: str, levels: Mapping[str, LevelPlan], order: Sequence[str]
) -> tuple[str, ...]:
    """Say why, with the numbers."""
    if not order:
        return ("No level fits, so O0 (float32) is what is left; the problems are listed below.",)
    best = levels[recommended]
    found = [_fits(best)]
    if best.half == "float16":
        found.append(_scaling(best))
    verification = best.verification
    if verification is not None:
        found.append(
            f"{len(verification.losses)} steps at {recommended} stayed within "
            f"{verification.deviation:.2%} of float32's losses, relative to the first one; "
            f"{verification.skipped} were skipped."
        )
    found += [_instead(plan, best) for plan in levels.values() if plan.level != recommended]
    return tuple(found)


def _fits(plan: LevelPlan) -> str:
    room = [t.headroom for t in plan.tensors if t.headroom is not None and t.what != "update"]
    left = f"at least {min(room):.1f} powers of two above the largest value seen" if room else ""
    return f"In {plan.half} nothing that {plan.level} has in half overflows: {left or 'no value'}."


def _scaling(plan: LevelPlan) -> str:
    gradients = [t for t in plan.tensors if t.what == "gradient"]
    nonzero = sum(t.nonzero for t in gradients)
    if not nonzero:
        return "No gradient is half, so the loss scale does not matter."
    lost = sum(t.lost for t in gradients) / nonzero
    without = sum(t.lost_unscaled for t in gradients) / nonzero
    largest = max(t.max_abs for t in gradients)
    return (
        f"The largest gradient is {largest:.2g}. Without a loss scale {without:.1%} of the "
        f"gradients' elements would vanish; at {plan.loss_scale:,.0f} {lost:.1%} do."
    )


def _instead(plan: LevelPlan, best: LevelPlan) -> str:
    if not plan.fits:
        return f"{plan.level} does not fit: {problem_lines(plan.problems)[0]}"
    if plan.level not in OPT_LEVELS:
        updates = [t for t in plan.tensors if t.what == "update"]
        lost = sum(t.stalled or 0 for t in updates) / max(sum(t.nonzero for t in updates), 1)
        return f"{plan.level} loses only {lost:.0%} of the updates to rounding in these steps."
    policy = OPT_LEVELS[plan.level]
    if policy.cast_model_type is not None and not policy.master_weights:
        return f"{plan.level} fits in these steps, but has no float32 weights to fall back on."
    if plan.is_tight and not best.is_tight:
        return f"{plan.level} fits with little room."
    if plan.moved < best.moved * CLOSE:
        exact = "has more digits" if best.half != plan.half else "moves fewer bytes"
        return f"{plan.level} fits too; {best.level} {exact}."
    return f"{plan.level} fits too, but moves {bytes_text(plan.moved)} instead of " + (
        f"{bytes_text(best.moved)} in a step."
    )
